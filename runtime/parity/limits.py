"""How far a tensor may be from its golden where bit equality cannot be asked (goldens/README.md).

Every number is a line of that file's table "Recommended tolerances", measured between equivalent
implementations; None means the table says not to gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest figures that pass; `name` is its row in the table of docs/goldens.md."""

    name: str
    relative_l2: float = inf
    max_abs: float = inf


EXACT = Limit(name="exact", relative_l2=0.0, max_abs=0.0)
# any stage; also the fp32 VAEs' encoders and the audio VAE (5e-6)
FP32 = Limit(name="fp32 stage", relative_l2=1e-5)
BF16 = Limit(name="bf16 denoiser, whole run", relative_l2=2.5e-2)
# guidance multiplies the rounding noise
BF16_GUIDED = Limit(name="bf16 denoiser with guidance", relative_l2=6e-2)
BF16_MODULE = Limit(name="bf16, one module", relative_l2=5e-3)  # from its stored input
# from its stored input: INT8, FP8, NVFP4
QUANTISED_LINEAR = Limit(name="one quantised linear", relative_l2=1e-3)
# in fp32 too: one flipped rounding spreads
INT8 = Limit(name="INT8", relative_l2=5e-2)
FP8_NATIVE = Limit(name="FP8 with quantised activations", relative_l2=1.5e-1)
VAE_FP32 = Limit(name="video VAE fp32", relative_l2=2e-6)
VAE_FP32_PIXELS = Limit(name="video VAE fp32, pixels", relative_l2=2e-6, max_abs=1e-5)
VAE_FP16 = Limit(name="video VAE fp16", relative_l2=5e-3)

# Integer or float64 arithmetic, seeded noise: the same anywhere
_EXACT_STAGES = ("layout", "text tokens", "noise", "tables", "start")
_TEXT_STAGES = ("vision tower", "text embeds", "text layers", "schedule", "solver")
_AUDIO_VAE_STAGES = ("audio VAE encode", "audio VAE decode")


def limit_of(golden: Golden, comparison: Comparison) -> Limit | None:
    """The limit of one tensor; None: not gated."""
    stage = comparison.stage
    if stage in _EXACT_STAGES or comparison.name.startswith("header/"):
        return EXACT
    if golden.kind in ("vae_decode", "vae_encode"):
        vae = str(golden.params.get("vvae", ""))
        return _video_vae(comparison, golden.header["vae_dtype"], int8="int8" in vae)
    if golden.kind == "quant":
        return _quant(comparison.name)
    if golden.kind not in ("e2e", "capture") or stage in _TEXT_STAGES:
        return FP32
    return _end_to_end(golden, comparison)


def _video_vae(comparison: Comparison, dtype: str, *, int8: bool) -> Limit:
    if int8:
        return INT8
    if dtype != "torch.float32":
        return VAE_FP16
    if comparison.stage != "video VAE decode":
        return FP32
    pixels = comparison.name in ("out/video", "decode/video")
    return VAE_FP32_PIXELS if pixels else VAE_FP32


def _end_to_end(golden: Golden, comparison: Comparison) -> Limit | None:
    dtype = str(golden.header["vae_dtype"]["video"])
    int8 = "int8" in str(golden.params.get("vvae", ""))
    stage, staged = comparison.stage, comparison.run == "staged"
    if stage == "reference encode":
        return _video_vae(comparison, dtype, int8=int8)
    if stage == "video VAE decode" and staged:
        return _video_vae(comparison, dtype, int8=int8)
    if stage in _AUDIO_VAE_STAGES and staged:
        return FP32
    limit = _denoiser(golden, linear=stage.startswith("module "))
    if limit is None or staged:
        return limit
    upstream = INT8 if int8 else VAE_FP16 if dtype != "torch.float32" else FP32
    return limit if limit.relative_l2 >= upstream.relative_l2 else upstream


def _denoiser(golden: Golden, *, linear: bool) -> Limit | None:
    params, dit = golden.params, str(golden.params["dit"])
    native = bool(params.get("native_quant", False))
    int8 = "int8" in dit or "mixed" in dit  # a mixed file may hold INT8 layers
    if int8 or native:
        if linear:
            return QUANTISED_LINEAR
        if native and "nvfp4" in dit:
            return None
        return INT8 if int8 else FP8_NATIVE
    if params["compute"] == "fp32":
        return FP32
    if linear:
        return BF16_MODULE
    return BF16 if float(params.get("cfg", 1.0)) == 1.0 else BF16_GUIDED


def _quant(name: str) -> Limit:
    derived = name.split("/")[-1]
    if not derived.startswith("linear"):
        return EXACT  # codes, scales and their products: no sums
    if "dequant" in derived:
        return BF16_MODULE if "bf16" in derived else FP32
    return QUANTISED_LINEAR
