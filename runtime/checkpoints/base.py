"""What the rest of the runtime sees of a checkpoint file: names, shapes, and tensors it owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.layer import LayerQuant

__all__ = ["UNQUANTISED", "Checkpoint", "CheckpointError", "LayerQuant", "PackedWeight"]

UNQUANTISED = "unquantised"  # stands where a stored format is named


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """One quantised layer as stored: packed bytes and scales stay packed.

    tensors: "weight", "weight_scale" (+ "weight_scale_2", "input_scale", "pre_quant_scale",
    "bias").
    FP8 weights given as U8 bytes are already viewed as their float8 dtype.
    """

    layer: str
    quant: LayerQuant
    shape: tuple[int, int]  # logical [N out, K in]
    tensors: Mapping[str, Tensor]


class Checkpoint(Protocol):
    """An open checkpoint: prefix stripped, markers parsed; nothing is read until asked for."""

    layers: Mapping[str, LayerQuant]  # quantised layers by module name
    quantised: bool  # at least one marker in the file: ComfyUI's mixed ops apply (contract 1.4b)
    metadata: Mapping[str, Any]

    def names(self) -> tuple[str, ...]:
        """All tensor names without prefix and without markers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape (packed shape for a packed weight)."""

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype."""

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A copy in its own allocation (contract 0.1: never a view of the mmap)."""

    def packed(self, layer: str, device: torch.device | str = "cpu") -> PackedWeight:
        """The tensors of a quantised layer."""
