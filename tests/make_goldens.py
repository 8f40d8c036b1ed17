"""`python tests/make_goldens.py FOLDER`: refills tests/goldens from the full golden folder.

The checkout must stay small, so a case keeps its header and every tensor but those matched below;
the kept tensors are the original bytes. Cases that are not named are left to the full folder.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

LATER_BLOCKS = r"mod/pos/blocks\.[12]\.(?!out).+"  # block 0 keeps its modules
ATTENTION = rf"{LATER_BLOCKS}|mod/pos/blocks\.0\.attn\.[qkv]"
NARROW = rf"{ATTENTION}|mod/pos/blocks\.0\.(attn\.qkv_proj\.out|attn\.out_proj\.in|mlp\..+)"
CASES: dict[str, str] = {  # case -> names that are dropped
    "ref2va_1img_22f_res_beta_12_s440202_bf16": r"step_(0[3-9]|10)/.+|decode/audio|final_x0/.+",
    "ref2va_mix_all_22f_bf16": r"mod/.+|step_0[23]/.+",
    "fl2va_39f_64x64_res_simple": r"mod/.+|decode/.+|step_0[1-6]/.+|final_x0/.+",
    "guide_clip_audio_39f": r"mod/.+|step_0[12]/.+|final_x0/.+",
    "t2va_odd_48x80_22f": r"decode/.+|mod/.+|step_0[123]/.+|final_x0/.+",
    "ref2va_1img_22f_cfg4_textneg": r"step_0[123]/.+|final_x0/.+",
    "ref2va_1img_22f_cfg3_refneg_euler": r"step_0[12]/.+|final_x0/.+",
    "t2va_22f_img2img_denoise05": r"step_0[12]/.+",
    "t2va_22f_shift_7_2": r"step_0[123]/.+",
    "unit_pruned_fp32": NARROW,
    "unit_pruned_bf16": NARROW,
    "unit_nvfp4_mixed_dequant_bf16": r"mod/pos/blocks\..+\..+\..+",
    "unit_nvfp4_mixed_native_bf16": ATTENTION,
    "unit_int8_convrot_bf16": rf"{ATTENTION}|mod/pos/blocks\.0\.attn\.qkv_proj\.out",
    "te_bf16": r"te/.+/patches|te/[34]/layer_.+",
    "te_nvfp4_awq": "",
    "vae_decode_tlat1_32x48": "",
    "vae_decode_tlat9_32x48": r"clip_0/.+",
    "vae_decode_5f_288x32_tiled": "",
    "vae_decode_5f_64x64_modules_fp16": r"mod/block_[12].*",
    "vae_decode_22f_32x32_int8": r"mod/block_[12].*",
    "vae_encode_odd_tiled": r"(in|out)/2/.+",
    "vae_encode_small": r"mod/(conv_in|down_[01].*)|(in|out)/[245]/.+",
    "audio_vae_decode": r"out/latent_0/.+_loud|mod/decoder\.(ups\.[2-6]|act).*|(in|out)/latent_1.*",
    "audio_vae_round_trip": r"mod/encoder\.block\.[0-3]|(in|out)/[134]/.+",
    "schedules": "",
    "quant_primitives": r"2/.+|1/.+/dequant_.+",
    "layout_real_sizes": r"layout_0/(rows|position_ids|rope_angles_every_7th)",
}


def main(source: Path, target: Path) -> None:
    """Write each case of CASES from `source` into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for case, dropped in CASES.items():
        file = safe_open(str(source / f"{case}.safetensors"), framework="pt")
        names = [n for n in file.keys() if not re.fullmatch(dropped or "-", n)]  # noqa: SIM118
        header = json.loads(file.metadata()["header"])
        header["dropped"] = dropped
        metadata = {"header": json.dumps(header, separators=(",", ":"))}
        path = target / f"{case}.safetensors"
        save_file({n: file.get_tensor(n) for n in names}, str(path), metadata)
        print(f"{path.stat().st_size:>9} {case}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parent / "goldens")
