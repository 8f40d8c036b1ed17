"""FP8 W8A8: activations clamped to e4m3 without dynamic scaling, torch's scaled matmul."""

from __future__ import annotations

import comfy_kitchen as ck
import torch
from torch import Tensor

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.packed import PackedLinear


class FP8NativeLinear(PackedLinear):
    """Scale 1 for the activation unless the file has input_scale: ComfyUI does not scale (8.4)."""

    def forward(self, x: Tensor) -> Tensor:
        x_SK = self.scaled_input(x).reshape(-1, self.in_features)
        scale = self.input_scale
        if scale is None:
            scale = torch.ones((), dtype=torch.float32, device=x.device)
        codes = ck.quantize_per_tensor_fp8(x_SK, scale, torch.float8_e4m3fn)
        y_SN = torch._scaled_mm(
            codes.contiguous(),
            self.weight.t(),
            scale_a=scale.to(torch.float32),
            scale_b=self.weight_scale.to(torch.float32),
            bias=self.bias_as(x),
            out_dtype=x.dtype,
        )
        return y_SN.reshape(*x.shape[:-1], self.out_features)


def reason(device: torch.device) -> str:
    """Why the scaled matmul cannot run on that device; "" if it can."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 matmul needs compute capability 8.9 or newer"
    return ""


BACKEND = LinearBackend(
    name="fp8_native",
    formats=("float8_e4m3fn",),
    build=FP8NativeLinear,
    reason=reason,
    requirement="a CUDA GPU of compute capability 8.9 or newer, or a CPU",
    route=lambda device: f"torch {torch.__version__} _scaled_mm, per tensor",
)
