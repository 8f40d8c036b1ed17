"""NVFP4 weights dequantised, ordinary matmul: what ComfyUI does without FP4 hardware (8.3)."""

from __future__ import annotations

import torch

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import DequantisedLinear

BACKEND = LinearBackend(
    name="nvfp4_dequant",
    formats=("nvfp4",),
    build=DequantisedLinear,
    reason=lambda device: "",
    package="comfy-kitchen",
    route=lambda device: f"dequantise to the activation dtype, torch {torch.__version__} linear",
)
