"""INT8 weights dequantised and rotated back, ordinary matmul (contract 8.6): the exact reference.

What int8_convrot rounds, the activations, is not rounded here; slow, for comparisons.
"""

from __future__ import annotations

import torch

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import DequantisedLinear

BACKEND = LinearBackend(
    name="int8_dequant",
    formats=("int8_tensorwise",),
    build=DequantisedLinear,
    reason=lambda device: "",
    package="comfy-kitchen",
    route=lambda device: f"dequantise to the activation dtype, torch {torch.__version__} linear",
)
