"""Bytes of the denoiser's linears that a plan loads in another form than the file stores."""

from __future__ import annotations

import re
from math import prod

from runtime.checkpoints.classify import Residence, TensorReport
from runtime.messages import FP8_BACKENDS, Plan

# What fp8_rowwise and fp8_tensorwise compute: NARROW of runtime/h3/linears.py
# The same are shared among tensor parallel ranks.
SHARED = re.compile(r"blocks\.\d+\.(attn\.(qkv|out)_proj|mlp\.fc[12])\.")
# widened at use, or at load with weights = cached
_DEQUANTISED = ("nvfp4_dequant", "fp8_dequant", "int8_dequant")


def converted(tensor: TensorReport, plan: Plan, rule: Residence) -> int | None:
    """Bytes of one tensor of the denoiser on the device; None: as it would be without the plan."""
    suffix = tensor.name.rpartition(".")[2]
    if rule.role != "dit" or tensor.role == "marker" or suffix in ("bias", "pre_quant_scale"):
        return None
    by_format = {"": plan.dense, "nvfp4": plan.nvfp4, "int8_tensorwise": plan.int8}
    backend = by_format.get(tensor.quant, plan.fp8)
    numel = prod(tensor.shape) * (2 if tensor.quant == "nvfp4" else 1)  # two values a byte
    is_weight = suffix == "weight"
    if backend in FP8_BACKENDS and SHARED.match(tensor.name) and not tensor.full_precision:
        if not is_weight:
            return 0
        return numel + 4 * (tensor.shape[0] if backend == "fp8_rowwise" else 1)
    dequantised = tensor.full_precision or backend in (*_DEQUANTISED, *FP8_BACKENDS)
    if not (tensor.quant and dequantised and plan.weights == "cached"):
        return None
    wide = rule.bytes(tensor.role, tensor.name, numel=numel, stored=0, packed=False)
    return wide if is_weight else 0
