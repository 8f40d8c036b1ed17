"""FP8 W8A8: activations clamped to e4m3 without dynamic scaling, torch's scaled matmul."""

from __future__ import annotations

import functools

import comfy_kitchen as ck
import torch
from torch import Tensor

from runtime.checkpoints.base import PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.packed import PackedLinear


class FP8NativeLinear(PackedLinear):
    """Scale 1 for the activation unless the file has input_scale: ComfyUI does not scale (8.4)."""

    def forward(self, x: Tensor) -> Tensor:
        codes_SK, scale = self.quantise(x)
        y_SN = torch._scaled_mm(
            codes_SK.contiguous(),
            self.weight.t(),
            scale_a=scale.to(torch.float32),
            scale_b=self.weight_scale.to(torch.float32),
            bias=self.bias_as(x),
            out_dtype=x.dtype,
        )
        return y_SN.reshape(*x.shape[:-1], self.out_features)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [...,K] as codes [S,K] and their scale []."""
        x_SK = self.scaled_input(x).reshape(-1, self.in_features)
        scale = self.input_scale
        if scale is None:
            scale = torch.ones((), dtype=torch.float32, device=x.device)
        return ck.quantize_per_tensor_fp8(x_SK, scale, torch.float8_e4m3fn), scale


def reference(packed: PackedWeight, x: Tensor) -> Tensor:
    """The same codes multiplied in float64, which every CPU can; x [...,K] -> [...,N]."""
    module = FP8NativeLinear(packed)
    codes_SK, scale = module.quantise(x)
    acc_SN = codes_SK.double() @ module.weight.double().t()
    y_SN = acc_SN * (scale.double() * module.weight_scale.double())
    bias = module.bias_as(x)
    y_SN = y_SN if bias is None else y_SN + bias.double()
    return y_SN.to(x.dtype).reshape(*x.shape[:-1], module.out_features)


def reason(device: torch.device) -> str:
    """Why the scaled matmul cannot run on that device; "" if it can."""
    if device.type == "cpu":
        return _cpu_reason()
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8 matmul needs compute capability 8.9 or newer"
    return ""


@functools.cache
def _cpu_reason() -> str:
    """Tried: oneDNN multiplies FP8 on some CPUs only, and has no list of them."""
    codes, scale = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        said = str(error).partition(".")[0]
        return f"torch {torch.__version__} has no FP8 matmul for this CPU ({said})"
    return ""


BACKEND = LinearBackend(
    name="fp8_native",
    formats=("float8_e4m3fn",),
    build=FP8NativeLinear,
    reason=reason,
    reference=reference,
    requirement="a CUDA GPU of compute capability 8.9 or newer, or a CPU that oneDNN has FP8 for",
    route=lambda device: f"torch {torch.__version__} _scaled_mm, per tensor",
)
