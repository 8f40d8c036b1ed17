"""Rebuilds the goldens' tiny checkpoints, byte for byte, from a whole file and small deltas.

Most tensors of H3's nine files are those of the demo model, unchanged or quantised; of LTX's three
those of the bf16 one. A delta holds the rest, and in its metadata the original header and the
SHA-256 that the rebuilt file must have; it is a safetensors file, compressed with xz.
`python -m runtime.parity.tiny_checkpoints FOLDER [h3 | ltx]` fills a folder for `launch.py parity`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
import os
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy_kitchen as ck
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from runtime.kernels.linear.int8_convrot import rotate
from runtime.media.files import write_bytes_atomic
from runtime.packed_files import unpack, unpack_demo

PRESETS = Path(__file__).parents[2] / "presets"
DEMO, DELTAS = PRESETS / "demo", PRESETS / "checkpoint_deltas"
LTX = PRESETS.parent / "tests" / "goldens_ltx" / "checkpoints"
WHOLE = (
    "h3_tiny_audio_vae_fp32",
    "h3_tiny_pruned_bf16",
    "h3_tiny_video_vae_fp16",
    "qwen3vl_tiny_bf16",
)
BASES = {
    "h3_tiny_bf16": "h3_tiny_pruned_bf16",
    "h3_tiny_pruned_int8_convrot": "h3_tiny_pruned_bf16",
    "h3_tiny_pruned_nvfp4_mixed": "h3_tiny_pruned_bf16",
    "h3_tiny_video_vae_int8_convrot": "h3_tiny_video_vae_fp16",
    "qwen3vl_tiny_nvfp4_awq": "qwen3vl_tiny_bf16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    kept: dict[str, Tensor]
    header: dict[str, Any]  # of the original
    sha256: str  # of the original file


def build_checkpoints(folder: Path) -> Path:
    """Fill `folder` with links to the demo files and the rebuilt ones; right ones stay."""
    unpack_demo()
    folder.mkdir(parents=True, exist_ok=True)
    for name in WHOLE:
        link = folder / f"{name}.safetensors"
        if not link.exists():
            link.unlink(missing_ok=True)  # it led to a checkout that was moved
            link.symlink_to(os.path.relpath(DEMO / link.name, folder))
    for name, base in BASES.items():
        path = folder / f"{name}.safetensors"
        rebuild(path, folder / f"{base}.safetensors", DELTAS / f"{path.name}.xz")
    return folder


def build_ltx_checkpoints(folder: Path) -> Path:
    """Fill `folder` with those of LTX's goldens; right ones stay."""
    unpack(LTX, folder)
    for delta in sorted((LTX / "deltas").glob("*.xz")):
        rebuild(folder / delta.stem, folder / "t_bf16.safetensors", delta)
    return folder


def rebuild(path: Path, base: Path, delta: Path) -> None:
    """Write `path` from the file that it was derived from and the rest; a right one stays."""
    rest = _read_delta(delta)
    if not path.exists() or _digest(path.read_bytes()) != rest.sha256:
        _rebuild(path, base, rest)


def write_delta(original: Path, base: Path, delta: Path) -> None:
    """The inverse, for whoever adds a checkpoint: keep only what cannot be derived from `base`."""
    header, data = _raw(original)
    wanted = safe_open(str(original), framework="pt")
    have = safe_open(str(base), framework="pt")
    names = [n for n in header if n != "__metadata__"]
    kept = {n: wanted.get_tensor(n) for n in names if n not in have.keys()}  # noqa: SIM118
    for name in names:
        if name not in kept and _bytes(_derived(name, header, kept, have)) != data(name):
            kept[name] = wanted.get_tensor(name)
    packed = base64.b64encode(zlib.compress(_json(header), 9)).decode()
    metadata = {"header": packed, "sha256": _digest(original.read_bytes())}
    write_bytes_atomic(delta, lzma.compress(save(kept, metadata), preset=9 | lzma.PRESET_EXTREME))


def _read_delta(path: Path) -> _Delta:
    file = lzma.decompress(path.read_bytes())
    (length,) = struct.unpack_from("<Q", file)
    metadata = json.loads(file[8 : 8 + length])["__metadata__"]
    header = json.loads(zlib.decompress(base64.b64decode(metadata["header"])))
    return _Delta(kept=load(file), header=header, sha256=metadata["sha256"])


def _rebuild(path: Path, base: Path, delta: _Delta) -> None:
    header, kept = delta.header, delta.kept
    have = safe_open(str(base), framework="pt")
    text = _json(header)
    text += b" " * (-len(text) % 8)
    parts = [struct.pack("<Q", len(text)), text]
    tensors = {n: spec for n, spec in header.items() if n != "__metadata__"}
    for name in sorted(tensors, key=lambda n: tensors[n]["data_offsets"]):
        tensor = kept[name] if name in kept else _derived(name, header, kept, have)
        parts.append(_bytes(tensor))
    file = b"".join(parts)
    if _digest(file) != delta.sha256:
        raise AssertionError(f"{path.name} was not rebuilt byte for byte on this machine")
    write_bytes_atomic(path, file)


def _derived(name: str, header: dict[str, Any], kept: dict[str, Tensor], have: Any) -> Tensor:
    """The base's tensor, quantised with the scales of the delta where its stored dtype asks so."""
    tensor: Tensor = have.get_tensor(name)
    layer = name.removesuffix(".weight")
    scale, second = kept.get(f"{layer}.weight_scale"), kept.get(f"{layer}.weight_scale_2")
    dtype = header[name]["dtype"]
    if scale is None or name == layer:
        return tensor
    if dtype == "I8":
        marker = json.loads(bytes(kept[f"{layer}.comfy_quant"].tolist()))
        group = marker.get("convrot_groupsize", 0) if marker.get("convrot") else 0
        rotated = rotate(tensor.double(), group) if group else tensor.double()
        return (rotated.float() / scale.reshape(-1, 1)).round().clamp(-128, 127).to(torch.int8)
    if dtype == "F8_E4M3":
        return ck.quantize_per_tensor_fp8(tensor.float(), scale, torch.float8_e4m3fn)
    if dtype == "U8" and second is not None:
        return ck.quantize_nvfp4(tensor.float(), second)[0]
    return tensor


def _raw(path: Path) -> tuple[dict[str, Any], Any]:
    file = path.read_bytes()
    length = struct.unpack_from("<Q", file)[0]
    header = json.loads(file[8 : 8 + length])

    def data(name: str) -> bytes:
        start, stop = header[name]["data_offsets"]
        return file[8 + length + start : 8 + length + stop]

    return header, data


def _digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def _json(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    fill = build_ltx_checkpoints if "ltx" in sys.argv[2:] else build_checkpoints
    fill(Path(sys.argv[1]))
