"""Linear backends of the quantised formats; a new one is one file with `BACKEND` and one word here."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from runtime.checkpoints.base import PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.unavailable import Unavailable

__all__ = ["BACKENDS", "LinearBackend", "linear_backend", "linear_builder"]

BACKENDS = (
    "nvfp4_dequant",
    "nvfp4_native",
    "nvfp4_kitchen_fallback",
    "fp8_dequant",
    "fp8_native",
    "int8_convrot",
)


def linear_backend(name: str) -> LinearBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"linear backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return importlib.import_module(f"runtime.kernels.linear.{name}").BACKEND


def linear_builder(
    names: tuple[str, ...], device: torch.device
) -> Callable[[PackedWeight, nn.Module], nn.Module]:
    """A `build_linear` for load_into: each stored format goes to the one named backend that runs it.

    A layer flagged full_precision_matrix_mult is dequantised whatever the plan names (contract 8.1).
    """
    by_format = {f: linear_backend(name) for name in names for f in linear_backend(name).formats}
    whole = {f: linear_backend(n) for n in ("nvfp4_dequant", "fp8_dequant") for f in _formats(n)}

    def build(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
        kind = packed.quant.format
        table = whole if packed.quant.full_precision and kind in whole else by_format
        if kind not in table:
            raise Unavailable(", ".join(names), f"none of them runs {kind} ({packed.layer})")
        if reason := table[kind].reason(device):
            raise Unavailable(table[kind].name, reason)
        return table[kind].build(packed)

    return build


def _formats(name: str) -> tuple[str, ...]:
    return linear_backend(name).formats
