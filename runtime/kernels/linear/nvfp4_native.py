"""NVFP4 W4A4: activations quantised too; FP4 tensor cores on Blackwell, on the CPU a reference."""

from __future__ import annotations

from typing import NamedTuple

import comfy_kitchen as ck
import torch
from comfy_kitchen.exceptions import BackendError
from comfy_kitchen.registry import registry
from torch import Tensor

from runtime.checkpoints.base import PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.packed import ALL_COLUMNS, AmaxLinear, ShareAmax, unshared
from runtime.kernels.unavailable import Unavailable

MATMUL = "scaled_mm_nvfp4"
FP4_TIMES_FP8_MAX = 6.0 * 448.0


def activation_scale(
    x_SK: Tensor, input_scale: Tensor | None, share_amax: ShareAmax = unshared
) -> Tensor:
    """Per-tensor fp32 scale: the stored one, else amax/2688 over ALL rows, divided in x's dtype.

    share_amax: a part of the rows to the amax of all of them, on every rank (contract 8.3). If all
    of x is zero so is the scale, and the quantiser's 0/0 is NaN: the run stops as non-finite.
    """
    if input_scale is not None:
        return input_scale.to(torch.float32)
    return (share_amax(torch.amax(x_SK.abs())) / FP4_TIMES_FP8_MAX).to(torch.float32)


def quantise(x_SK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes (rows and columns padded to 16 with zeros) and swizzled e4m3 block scales."""
    rows, columns = x_SK.shape
    return ck.quantize_nvfp4(x_SK, scale, pad_16x=bool(rows % 16 or columns % 16))


class NVFP4Rows(NamedTuple):
    """x is about codes * block scales * scale: what `quantise` makes of num_rows rows."""

    codes: Tensor  # packed, [S, K/2] bytes, both padded with zeros
    blocks: Tensor  # e4m3, a value per 16 of a row, in tiles of 128 x 4
    scale: Tensor  # [] fp32
    num_rows: int
    dtype: torch.dtype  # of x, and of what is made of it


class NVFP4NativeLinear(AmaxLinear):
    """y = round(acc * (s2_x * s2_w) + b) with fp32 accumulation (contract 0.1.7, 8.3)."""

    weight_scale_2: Tensor
    input_scale: Tensor | None

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed)
        # Used by the CPU reference only: codes times block scales, exact in fp32.
        self._unscaled: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplied(self.packed_rows(x)).reshape(*x.shape[:-1], self.out_features)

    def packed_rows(self, x: Tensor, columns: slice = ALL_COLUMNS) -> NVFP4Rows:
        """x [..., K] as it is multiplied, or those columns of it; with share_amax's scale."""
        x_SK = self.scaled_input(x, columns).reshape(-1, x.shape[-1])
        scale = activation_scale(x_SK, self.input_scale, self.share_amax)
        return NVFP4Rows(*quantise(x_SK, scale), scale, x_SK.shape[0], x.dtype)

    def multiplied(self, x: NVFP4Rows) -> Tensor:
        """[S, N]; each row of it comes from its own row alone."""
        multiply = self._tensor_cores if x.codes.is_cuda else self._reference
        return multiply(x)[: x.num_rows, : self.out_features]

    def _tensor_cores(self, x: NVFP4Rows) -> Tensor:
        operands = {
            "a": x.codes,
            "b": self.weight,
            "tensor_scale_a": x.scale,
            "tensor_scale_b": self.weight_scale_2,
            "block_scale_a": x.blocks,
            "block_scale_b": self.weight_scale,
            "bias": self.bias_as(x),
            "out_dtype": x.dtype,
        }
        # ck.scaled_mm_nvfp4 dequantises where its CUDA kernel does not take the operands (K not a
        # multiple of 32, fp32 results), and use_backend("cuda") does not keep it from that.
        try:
            matmul = registry.get_implementation(MATMUL, backend="cuda", kwargs=operands)
        except BackendError as error:
            raise Unavailable(
                "nvfp4_native",
                f"layer {self.packed.layer}, {(x.num_rows, self.in_features)} {x.dtype}: {error}",
            ) from error
        result: Tensor = matmul(**operands)
        return result

    def _reference(self, x: NVFP4Rows) -> Tensor:
        one = torch.ones((), dtype=torch.float32)
        if self._unscaled is None:
            scales = self.weight_scale.view(torch.float8_e4m3fn)
            self._unscaled = ck.dequantize_nvfp4(self.weight, one, scales, torch.float32)
        x_SK = ck.dequantize_nvfp4(x.codes, one, x.blocks, torch.float32)
        y_SN = torch.mm(x_SK, self._unscaled.t()) * (x.scale * self.weight_scale_2)
        bias = self.bias_as(x)
        if bias is not None:
            y_SN[:, : self.out_features] += bias.float()
        return y_SN.to(x.dtype)


def reason(device: torch.device) -> str:
    """Why the FP4 matmul cannot run on that device; "" if it can (the CPU runs the reference)."""
    if device.type == "cpu":
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability < (10, 0):
        got = ".".join(map(str, capability))
        return f"FP4 tensor cores need compute capability 10.0 (Blackwell), this GPU has {got}"
    backends = ck.list_backends()
    cuda = backends.get("cuda", {})
    if not cuda.get("available", False):
        return f"comfy-kitchen's CUDA backend is not available: {backends.get('cuda')}"
    if MATMUL not in cuda.get("capabilities", ()):
        return "comfy-kitchen's CUDA backend has no FP4 matmul (it found no cuBLASLt)"
    return ""


BACKEND = LinearBackend(
    name="nvfp4_native",
    formats=("nvfp4",),
    build=NVFP4NativeLinear,
    reason=reason,
    requirement=(
        "a Blackwell GPU (compute capability 10.0 or newer) and comfy-kitchen's CUDA backend; a "
        "CPU runs its reference"
    ),
    package="comfy-kitchen",
    route=lambda device: (
        "CPU reference, exact products" if device.type == "cpu" else "comfy-kitchen cuBLASLt FP4"
    ),
    scales_all_rows=True,
)
