"""INT8 linears: rows rotated (ConvRot), quantised row by row, multiplied in int32 (contract 8.6).

Axes: M rows, K input features, N output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.checkpoints.base import CheckpointError, PackedWeight
from runtime.kernels.linear.base import LinearBackend

FORMAT = "int8_tensorwise"
_H4 = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
_MIN_INT_MM_ROWS = 17  # cuBLASLt behind torch._int_mm refuses fewer
_EXACT_PRODUCTS = 1024  # 128 * 128 * 1024 = 2**24: every partial sum is exact in float32
_SCALE_FLOOR = 1e-30


def hadamard(group: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The regular Hadamard matrix kron^log4(group) of H4, divided by sqrt(group)."""
    h4 = torch.tensor(_H4, dtype=dtype, device=device)
    h = h4
    while h.shape[0] < group:
        h = torch.kron(h, h4)
    return h / group**0.5


def rotate(x_MK: Tensor, group: int) -> Tensor:
    """Each run of `group` features times H, in x's dtype."""
    h = hadamard(group, dtype=x_MK.dtype, device=x_MK.device)
    return (x_MK.unflatten(-1, (-1, group)) @ h).flatten(-2)


def quantise_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [M,K], fp32 scales [M,1]); the division and the rounding run in x's dtype.

    A row whose scale vanishes in fp16 is 0/0: the cast to int8 makes it 0, so the cast stays last.
    """
    scale_M1 = (x_MK.abs().amax(dim=-1, keepdim=True).float() / 127.0).clamp(min=_SCALE_FLOOR)
    quantised = (x_MK / scale_M1.to(x_MK.dtype)).round_().clamp_(-128.0, 127.0)
    return quantised.to(torch.int8), scale_M1


def multiply(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Exact products of int8 operands, int32 [M,N]."""
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


class Int8ConvRotLinear(nn.Module):
    """y = rotate(x) quantised per row, times int8 weights, in x's dtype; weights stay packed.

    Needs K and N in multiples of 8 on CUDA (torch._int_mm). Row-local: rows may be split over ranks.
    """

    route = "torch._int_mm"

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        num_out, num_in = packed.shape
        group = packed.quant.convrot_group
        if packed.quant.format != FORMAT:
            raise CheckpointError(
                f"layer {packed.layer} is stored as {packed.quant.format}, this linear takes {FORMAT}"
            )
        if group and (
            num_in % group or group < 4 or (group & (group - 1)) or group.bit_length() % 2 == 0
        ):
            raise CheckpointError(
                f"layer {packed.layer}: convrot group {group} must be a power of 4 that divides "
                f"its {num_in} input features"
            )
        scale = packed.tensors["weight_scale"]
        if scale.numel() not in (1, num_out):
            raise CheckpointError(
                f"layer {packed.layer}: weight_scale has {scale.numel()} values, allowed are 1 and "
                f"{num_out} (one per output)"
            )
        self.in_features, self.out_features, self.group = num_in, num_out, group
        self.register_buffer("weight", packed.tensors["weight"].contiguous())
        self.register_buffer("weight_scale", scale.float().reshape(-1))
        self.register_buffer("bias", packed.tensors.get("bias"))

    def forward(self, x: Tensor) -> Tensor:
        """x [...,K] -> [...,N] in x's dtype: acc * (s_x * s_w) in fp32, rounded, then + bias."""
        x_MK = x.reshape(-1, self.in_features)
        if self.group:
            x_MK = rotate(x_MK, self.group)
        quantised_MK, scale_M1 = quantise_rows(x_MK)
        acc_MN = multiply(quantised_MK, self.weight)
        y_MN = (acc_MN.float() * (scale_M1 * self.weight_scale)).to(x.dtype)
        if self.bias is not None:
            y_MN = y_MN + self.bias.to(x.dtype)
        return y_MN.unflatten(0, x.shape[:-1])

    def forward_swiglu(self, gate_up: Tensor) -> Tensor:
        """[gate|up] [...,2K] -> [...,N]: silu(gate) * up rounded in its dtype, then the linear."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self(F.silu(gate) * up)


BACKEND = LinearBackend(
    name="int8_convrot",
    formats=(FORMAT,),
    build=Int8ConvRotLinear,
    reason=lambda device: "",
    route=lambda device: f"torch {torch.__version__} _int_mm, rotation and row quantiser in torch",
)
