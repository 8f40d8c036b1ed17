"""Shared by the packed linears: buffers that keep their packed dtype, bias and AWQ input scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.checkpoints.base import PackedWeight

ShareAmax = Callable[[Tensor], Tensor]
ALL_COLUMNS = slice(None)


def unshared(amax: Tensor) -> Tensor:
    """All the activations are here."""
    return amax


class Activations(Protocol):
    """A tensor, or what a linear has made of one."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""


class PackedLinear(nn.Module):
    """Holds a packed weight as buffers; subclasses say how it is multiplied.

    Never call .to(dtype) on it: packed bytes and fp32 scales are data, not precision.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor | None
    input_scale: Tensor | None
    pre_quant_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed
        self.out_features, self.in_features = packed.shape
        for name in (
            "weight",
            "weight_scale",
            "weight_scale_2",
            "input_scale",
            "pre_quant_scale",
            "bias",
        ):
            self.register_buffer(name, packed.tensors.get(name))

    def scaled_input(self, x: Tensor, columns: slice = ALL_COLUMNS) -> Tensor:
        """AWQ: the input times pre_quant_scale, in the input's dtype (contract 5.7).

        columns: those of the input that x has.
        """
        if self.pre_quant_scale is None:
            return x
        return x * self.pre_quant_scale[columns].to(x.dtype)

    def bias_as(self, x: Activations) -> Tensor | None:
        """The bias rounded to the compute dtype, as ComfyUI's mixed ops load it (contract 1.4b)."""
        return None if self.bias is None else self.bias.to(x.dtype)


class AmaxLinear(PackedLinear):
    """One that may scale its activations by the largest of all of them.

    share_amax: that value to the one of all ranks that hold a part of these activations.
    """

    def __init__(self, packed: PackedWeight) -> None:
        super().__init__(packed)
        self.share_amax: ShareAmax = unshared


def beside_weight(packed: PackedWeight) -> Mapping[str, Tensor]:
    """What a layer keeps when its weight gets another form: bias and pre_quant_scale."""
    return {name: t for name, t in packed.tensors.items() if name in ("bias", "pre_quant_scale")}
