"""How far a tensor may be from its golden where bit equality cannot be asked (goldens/README.md).

Every number is a line of that file's table "Recommended tolerances", measured between equivalent
implementations; None means the table says not to gate.
"""

from __future__ import annotations

from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison

FP32 = 1e-5
BF16 = 2.5e-2
BF16_GUIDED = 6e-2  # guidance multiplies the rounding noise (stated at cfg 5)
BF16_MODULE = 5e-3  # one module from its stored input
INT8, INT8_LINEAR = 5e-2, 1e-3
FP8_NATIVE, FP8_LINEAR = 1.5e-1, 1e-3
NVFP4_LINEAR = 1e-3  # bit exact with the stored input; the margin of the other quantised linears
VIDEO_VAE = {"torch.float32": 1e-5, "torch.float16": 5e-3}
EXACT = 0.0

# Stages whose result is integer or float64 arithmetic, seeded noise or a schedule: the same anywhere
_EXACT_STAGES = ("layout", "text tokens", "noise", "tables", "start")
_CONDITION_STAGES = (
    "text tokens",
    "vision tower",
    "text embeds",
    "text layers",
    "reference encode",
    "audio VAE encode",
    "schedule",
    "solver",
)


def limit_of(golden: Golden, comparison: Comparison) -> float | None:
    """The largest relative L2 that passes; None: not gated."""
    if comparison.stage in _EXACT_STAGES or comparison.name.startswith("header/"):
        return EXACT
    if golden.kind in ("vae_decode", "vae_encode"):
        return VIDEO_VAE[golden.header["vae_dtype"]]
    if golden.kind == "quant":
        return _quant_limit(comparison.name)
    if golden.kind != "e2e" or comparison.stage in _CONDITION_STAGES:
        return FP32
    return _denoiser_limit(golden, comparison)


def _denoiser_limit(golden: Golden, comparison: Comparison) -> float | None:
    params, dit = golden.params, str(golden.params["dit"])
    native = bool(params.get("native_quant", False))
    linear = comparison.stage.startswith("module ")
    if "int8" in dit or "mixed" in dit:  # a mixed file may hold INT8 layers
        if linear:
            return INT8_LINEAR if params["compute"] == "fp32" else BF16_MODULE
        return None if native and "nvfp4" in dit else INT8
    if native and "nvfp4" in dit:
        return NVFP4_LINEAR if linear else None
    if native:
        return FP8_LINEAR if linear else FP8_NATIVE
    if params["compute"] == "fp32":
        return FP32
    if linear:
        return BF16_MODULE
    return BF16 if float(params.get("cfg", 1.0)) == 1.0 else BF16_GUIDED


def _quant_limit(name: str) -> float:
    derived = name.split("/")[-1]
    if derived.startswith("linear"):
        return BF16_MODULE if "bf16" in derived else INT8_LINEAR
    return EXACT if "dequant" in derived else FP32
