"""Tensor parallel: each rank holds some rows or some columns of a packed weight, as stored.

N output features, K input features. A weight cut by outputs needs nothing more; one cut by inputs
gives each rank a part of the sum, which is added up over the ranks in the activations' dtype: as
many roundings more as there are ranks, so the result is near one rank's, never its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from comfy_kitchen.float_utils import from_blocked, to_blocked
from torch import Tensor, nn

from runtime.checkpoints.base import PackedWeight

NVFP4_BLOCK = 16  # values along K that share a scale


def outputs_of(packed: PackedWeight, parts: Sequence[slice]) -> PackedWeight:
    """These output features, one part after the other."""

    def cut(x: Tensor) -> Tensor:
        return torch.cat([x[part] for part in parts])

    tensors = dict(packed.tensors)
    for name in ("weight", "bias"):
        if name in tensors:
            tensors[name] = _bytewise(tensors[name], cut)
    scale = tensors.get("weight_scale")
    if packed.quant.format == "nvfp4":
        tensors["weight_scale"] = _rescaled(packed, cut)
    elif scale is not None and scale.numel() > 1:
        tensors["weight_scale"] = cut(scale)
    return replace(packed, shape=(len(tensors["weight"]), packed.shape[1]), tensors=tensors)


def repeated(part: slice, times: int, stride: int) -> list[slice]:
    """The same part of several matrices that lie one after the other."""
    return [slice(part.start + i * stride, part.stop + i * stride) for i in range(times)]


def inputs_of(packed: PackedWeight, part: slice) -> PackedWeight:
    """These input features; of NVFP4 whole blocks of 16. A bias stays: one rank adds it."""
    tensors = dict(packed.tensors)
    if packed.quant.format == "nvfp4":
        assert not part.start % NVFP4_BLOCK and not part.stop % NVFP4_BLOCK, part
        stored = slice(part.start // 2, part.stop // 2)
        blocks = slice(part.start // NVFP4_BLOCK, part.stop // NVFP4_BLOCK)
        tensors["weight_scale"] = _rescaled(packed, lambda x: x[:, blocks])
    else:
        stored = part
    tensors["weight"] = _bytewise(tensors["weight"], lambda x: x[:, stored].clone())
    if "pre_quant_scale" in tensors:
        tensors["pre_quant_scale"] = tensors["pre_quant_scale"][part].clone()
    return replace(packed, shape=(packed.shape[0], part.stop - part.start), tensors=tensors)


class PartialSum(nn.Module):
    """A linear over some of the input features, and the sum of all ranks' results."""

    def __init__(self, linear: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._total = linear, total

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K of this rank] -> [..., N] on every rank."""
        return self._total(self.linear(x))


def _bytewise(x: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """FP8 has no cat: its bytes have."""
    if x.itemsize > 1:
        return cut(x)
    return cut(x.view(torch.uint8)).view(x.dtype)


def _rescaled(packed: PackedWeight, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """NVFP4 block scales, which lie in tiles of 128 x 4, for a part of the weight."""
    scale = packed.tensors["weight_scale"]
    blocks = packed.shape[1] // NVFP4_BLOCK
    plain_NB = from_blocked(scale.view(torch.uint8), packed.shape[0], blocks)
    return to_blocked(cut(plain_NB).contiguous(), flatten=False).view(scale.dtype)
