"""FP8 weights dequantised to the activation dtype, ordinary matmul (contract 8.4)."""

from __future__ import annotations

import torch

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import DequantisedLinear

BACKEND = LinearBackend(
    name="fp8_dequant",
    formats=("float8_e4m3fn", "float8_e5m2"),
    build=DequantisedLinear,
    reason=lambda device: "",
    package="comfy-kitchen",
    route=lambda device: f"dequantise to the activation dtype, torch {torch.__version__} linear",
)
