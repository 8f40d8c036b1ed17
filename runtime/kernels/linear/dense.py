"""Unquantised weights: an ordinary matmul in the activations' dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.packed import PackedLinear, beside_weight


class DenseLinear(PackedLinear):
    """The weight in the dtype that the activations will have."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...,K] -> [...,N] in x's dtype."""
        return F.linear(self.scaled_input(x), self.weight, self.bias_as(x))


def widened(packed: PackedWeight, dtype: torch.dtype) -> DenseLinear:
    """What DequantisedLinear computes for x of `dtype`, bit for bit, widened once and kept."""
    tensors = {"weight": dequantise(packed, dtype), **beside_weight(packed)}
    return DenseLinear(replace(packed, quant=LayerQuant(format=UNQUANTISED), tensors=tensors))


BACKEND = LinearBackend(
    name="dense",
    formats=(UNQUANTISED,),
    build=DenseLinear,
    reason=lambda device: "",
    route=lambda device: f"torch {torch.__version__} linear",
)
