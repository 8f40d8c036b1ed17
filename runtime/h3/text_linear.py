"""Linears and the embedding of the text encoder: weights stay as stored, widened to fp32 at use.

Axes: N output features, K input features, L tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.checkpoints.base import CheckpointError, PackedWeight
from runtime.kernels.linear.dequant import DequantisedLinear, dequantise_rows


class Linear(nn.Module):
    """y = x @ W.T + b in the input's dtype; W and b keep the dtype of the file."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Module):
    """Token ids [L] to fp32 rows [L,K]; the table keeps the dtype of the file."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, width), requires_grad=False)

    def forward(self, ids_L: Tensor) -> Tensor:
        return self.weight[ids_L].float()


class PackedEmbedding(nn.Module):
    """The same from an FP8 or INT8 table: only the looked-up rows are dequantised (0.1.9)."""

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, ids_L: Tensor) -> Tensor:
        return dequantise_rows(self.packed, ids_L, torch.float32)


def build_packed(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
    """The `build_linear` of load_into for this model: which module takes a packed layer."""
    if isinstance(replaced, Embedding):
        return PackedEmbedding(packed)
    if isinstance(replaced, Linear):
        return DequantisedLinear(packed)
    raise CheckpointError(
        f"layer {packed.layer} is stored as {packed.quant.format}; in a text encoder only linears "
        f"and the token embedding may be quantised"
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rope with one fused multiply-add: unfused it is 1 ulp off (contract 0.1.3)."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)


def frequencies(num: int, theta: float, device: torch.device) -> Tensor:
    """[num] fp32: 1 / theta ** (2i / 2num), in this order (contract 0.1.3)."""
    exponents = torch.arange(0, 2 * num, 2, device=device).float() / (2 * num)
    return 1.0 / (theta**exponents)
