"""Linear backends of quantised formats; a new one is one file with `BACKEND` and one word here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import DequantisedLinear
from runtime.kernels.unavailable import Unavailable

__all__ = ["BACKENDS", "LinearBackend", "linear_backend", "linear_builder", "require_linears"]

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


def require_linears(
    names: tuple[str, ...], layers: Iterable[LayerQuant], device: torch.device
) -> None:
    """Raise Unavailable unless the named backends run every stored format of `layers` on device."""
    by_format = _by_format(names)
    for kind in sorted({q.format for q in layers if not q.full_precision}):
        if kind not in by_format:
            raise Unavailable(", ".join(names), f"none of them runs {kind}")
        if reason := by_format[kind].reason(device):
            raise Unavailable(by_format[kind].name, reason)


def linear_builder(
    names: tuple[str, ...], device: torch.device
) -> Callable[[PackedWeight, nn.Module], nn.Module]:
    """A `build_linear` for load_into: each stored format goes to the named backend that runs it.

    A layer flagged full_precision_matrix_mult is dequantised whatever the plan names (8.1).
    ValueError for an unknown name; `build` raises Unavailable for a format that no named backend
    runs and for a backend that this device cannot run.
    """
    by_format = _by_format(names)

    def build(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
        kind = packed.quant.format
        if packed.quant.full_precision:
            return DequantisedLinear(packed)
        if kind not in by_format:
            raise Unavailable(", ".join(names), f"none of them runs {kind} ({packed.layer})")
        if reason := by_format[kind].reason(device):
            raise Unavailable(by_format[kind].name, reason)
        return by_format[kind].build(packed)

    return build


def _by_format(names: tuple[str, ...]) -> dict[str, LinearBackend]:
    return {f: backend for backend in map(linear_backend, names) for f in backend.formats}
