"""NVFP4 weights dequantised to the activation dtype, ordinary matmul: ComfyUI without FP4 hardware."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.packed import PackedLinear


class NVFP4DequantLinear(PackedLinear):
    """y = x @ dequant(W).T + b; activations untouched (contract 8.3, "emulated")."""

    def forward(self, x: Tensor) -> Tensor:
        weight = dequantise(self.packed, x.dtype)
        return F.linear(self.scaled_input(x), weight, self.bias_as(x))


BACKEND = LinearBackend(
    name="nvfp4_dequant",
    formats=("nvfp4",),
    build=NVFP4DequantLinear,
    reason=lambda device: "",
    route=lambda device: f"dequantise to the activation dtype, torch {torch.__version__} linear",
)
