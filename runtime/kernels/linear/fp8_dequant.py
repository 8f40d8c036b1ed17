"""FP8 weights dequantised to the activation dtype, ordinary matmul (contract 8.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.packed import PackedLinear


class FP8DequantLinear(PackedLinear):
    """y = x @ (W * scale).T + b, both factors rounded to x's dtype first."""

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantise(self.packed, x.dtype)
        return F.linear(self.scaled_input(x), weight, self.bias_as(x))


BACKEND = LinearBackend(
    name="fp8_dequant",
    formats=("float8_e4m3fn", "float8_e5m2"),
    build=FP8DequantLinear,
    reason=lambda device: "",
    route=lambda device: f"dequantise to the activation dtype, torch {torch.__version__} linear",
)
