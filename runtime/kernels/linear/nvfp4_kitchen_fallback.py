"""NVFP4, activations quantised, dequantised matmul: what ComfyUI runs when its FP4 matmul fails.

It exists so that goldens captured on such a machine can be replayed; nothing falls back to it.
"""

from __future__ import annotations

import comfy_kitchen as ck
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import dequantise, nvfp4_kernel
from runtime.kernels.linear.nvfp4_native import activation_scale, quantise
from runtime.kernels.linear.packed import AmaxLinear


class NVFP4KitchenFallbackLinear(AmaxLinear):
    """Quantise x to NVFP4, dequantise both operands to x's dtype, F.linear."""

    def forward(self, x: Tensor) -> Tensor:
        x_SK = self.scaled_input(x).reshape(-1, self.in_features)
        scale = activation_scale(x_SK, self.input_scale, self.share_amax)
        codes, blocks = quantise(x_SK, scale)
        with nvfp4_kernel(codes):
            rounded = ck.dequantize_nvfp4(codes, scale, blocks, x.dtype)
        rounded = rounded[: x_SK.shape[0], : self.in_features]
        y_SN = F.linear(rounded, dequantise(self.packed, x.dtype), self.bias_as(x))
        return y_SN.reshape(*x.shape[:-1], self.out_features)


BACKEND = LinearBackend(
    name="nvfp4_kitchen_fallback",
    formats=("nvfp4",),
    build=NVFP4KitchenFallbackLinear,
    reason=lambda device: "",
    package="comfy-kitchen",
    route=lambda device: f"activations rounded to NVFP4, torch {torch.__version__} linear",
    scales_all_rows=True,
)
