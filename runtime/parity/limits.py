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
    relative_max: float = inf  # max_abs over the golden's largest value


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
# LTX: goldens_ltx/README.md, "Tolerances seen"; that table's figure is the relative maximum
LTX_FP32 = Limit(name="LTX fp32 forward", relative_max=2e-6)
LTX_SAMPLER = Limit(name="LTX fp32 trajectory", relative_max=1e-5)
LTX_CONNECTORS = Limit(name="LTX connectors", relative_max=1e-5)
LTX_BF16 = Limit(name="LTX bf16 or W4A16 forward", relative_max=3e-2)
# Measured: 1.1e-1 between the two orders of rounding (runtime/ltx/forms.py), as codes flip
LTX_W4A4 = Limit(name="LTX W4A4 forward", relative_max=1.5e-1)
LTX_DEQUANT = Limit(name="LTX dequantised weight", relative_max=2e-7)
# Positions are formed as the reference forms them, so only the cosine itself may round elsewhere
LTX_ROPE = Limit(name="LTX rope table", max_abs=1e-6)
LTX_ROPE_SUM = Limit(name="LTX rope table, sums", relative_max=1e-6)
# One ulp: the product of three factors is formed in another order
LTX_FLOAT64 = Limit(name="LTX float64 coefficients", relative_max=1e-15)
LTX_STORED_DIGITS = Limit(name="a figure stored with 5 digits", max_abs=1.5e-5)

# Integer or float64 arithmetic, seeded noise: the same anywhere
_EXACT_STAGES = ("layout", "text tokens", "noise", "tables", "start")
_TEXT_STAGES = ("vision tower", "text embeds", "text layers", "schedule", "solver")
_AUDIO_VAE_STAGES = ("audio VAE encode", "audio VAE decode")


def limit_of(golden: Golden, comparison: Comparison) -> Limit | None:
    """The limit of one tensor; None: not gated."""
    stage = comparison.stage
    if golden.kind.startswith("ltx_"):
        return _ltx(golden, comparison)
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


def _ltx(golden: Golden, comparison: Comparison) -> Limit:
    name, stage = comparison.name, comparison.stage
    if stage in (
        "told apart",
        "scales",
        "codes",
        "positions",
        "frequencies",
        "weight digest",
        "noise",
        "schedule",
    ):
        return EXACT
    if stage == "coefficients":
        return LTX_FLOAT64
    if stage == "correlation":
        return LTX_STORED_DIGITS
    if golden.kind == "ltx_rope":
        return LTX_ROPE_SUM if ".check_" in name else LTX_ROPE
    half = golden.params.get("dtype", "float32") != "float32" and "_fp32" not in name
    if golden.kind == "ltx_sampler":
        return LTX_BF16 if half else LTX_SAMPLER
    if golden.kind == "ltx_connectors":
        return LTX_CONNECTORS
    if golden.kind == "ltx_dequant":
        return LTX_DEQUANT
    if golden.kind == "ltx_linear":
        return QUANTISED_LINEAR
    if "w4a4" in name:
        return LTX_W4A4
    return LTX_BF16 if half or "w4a16" in name else LTX_FP32
