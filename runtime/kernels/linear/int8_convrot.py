"""INT8 linears: rows rotated (ConvRot), quantised row by row, multiplied in int32 (contract 8.6).

Axes: M rows, K input features, N output features.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.packed import PackedLinear

_H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
_SCALE_FLOOR = 1e-30
_MIN_INT_MM_ROWS = 17  # cuBLASLt behind torch._int_mm refuses fewer
_EXACT_PRODUCTS = 1024  # 128 * 128 * 1024 = 2**24: every partial sum is exact in float32
_MAX_ACCUMULATORS = 2**26  # int32 values alive at once, then rounded to the activations' dtype
_ROUTES = {"cpu": "exact float32 blocks", "cuda": "torch._int_mm"}


@functools.cache
def hadamard(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The regular Hadamard matrix kron^log4(group) of H4 over sqrt(group); shared: do not write."""
    h4 = torch.tensor(_H4, dtype=dtype, device=device)
    h = h4
    while h.shape[0] < group:
        h = torch.kron(h, h4)
    return h / group**0.5


def rotate(x_MK: Tensor, group: int) -> Tensor:
    """Each run of `group` features times H, in x's dtype."""
    h = hadamard(group, x_MK.dtype, x_MK.device)
    return (x_MK.unflatten(-1, (-1, group)) @ h).flatten(-2)


def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [M,K], fp32 scales [M,1]); the division and the rounding run in x's dtype.

    A row whose scale vanishes in fp16 is 0/0: the cast to int8 makes it 0, so the cast stays last.
    """
    amax_M1 = x_MK.abs().amax(dim=-1, keepdim=True).float()
    # A tensor divisor: torch multiplies by the reciprocal of a Python number on CUDA, an ulp off.
    scale_M1 = (amax_M1 / amax_M1.new_full((), 127.0)).clamp(min=_SCALE_FLOOR)
    codes_MK = (x_MK / scale_M1.to(x_MK.dtype)).round_().clamp_(-128.0, 127.0)
    return codes_MK.to(torch.int8), scale_M1


def multiply(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Exact products of int8 operands, int32 [M,N]; on CUDA K and N must be multiples of 8."""
    if x_MK.is_cuda:
        short = max(0, _MIN_INT_MM_ROWS - x_MK.shape[0])
        return torch._int_mm(F.pad(x_MK, (0, 0, 0, short)), weight_NK.t())[: x_MK.shape[0]]
    # torch._int_mm saturates on CPUs without VNNI; float32 sums of 1024 products are whole numbers
    acc_MN = torch.zeros(x_MK.shape[0], weight_NK.shape[0], dtype=torch.int32)
    for x, weight in zip(
        x_MK.split(_EXACT_PRODUCTS, dim=1), weight_NK.split(_EXACT_PRODUCTS, dim=1), strict=True
    ):
        acc_MN += (x.float() @ weight.float().t()).to(torch.int32)
    return acc_MN


class Int8ConvRotLinear(PackedLinear):
    """y = rotate(x), quantised per row, times int8 weights; rows do not depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...,K] -> [...,N] in x's dtype: acc * (s_x * s_w) in fp32, rounded, then + bias."""
        x_MK = self.scaled_input(x).reshape(-1, self.in_features)
        group = self.packed.quant.convrot_group
        codes_MK, scale_M1 = quantise_rows(rotate(x_MK, group) if group else x_MK)
        rows = max(1, _MAX_ACCUMULATORS // self.out_features)
        parts = [
            self._products(codes, scale, x)
            for codes, scale in zip(codes_MK.split(rows), scale_M1.split(rows), strict=True)
        ]
        y_MN = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y_MN.unflatten(0, x.shape[:-1])

    def _products(self, codes_MK: Tensor, scale_M1: Tensor, x: Tensor) -> Tensor:
        acc_MN = multiply(codes_MK, self.weight).float()
        y_MN = acc_MN.mul_(scale_M1 * self.weight_scale.reshape(1, -1)).to(x.dtype)
        bias = self.bias_as(x)
        return y_MN if bias is None else y_MN + bias


def _reason(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 5):
        return "INT8 matmul needs compute capability 7.5 or newer"
    return ""


def _route(device: torch.device) -> str:
    return f"rotate, quantise per row, {_ROUTES[device.type]}, torch {torch.__version__}"


BACKEND = LinearBackend(
    name="int8_convrot",
    formats=("int8_tensorwise",),
    build=Int8ConvRotLinear,
    reason=_reason,
    route=_route,
    requirement="a CUDA GPU of compute capability 7.5 or newer, or a CPU",
    whole_inputs=True,
)
