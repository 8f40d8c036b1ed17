"""Linear backends of quantised formats; a new one is one file with `BACKEND` and one word here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dequant import DequantisedLinear
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
    names: tuple[str, ...], layers: Mapping[str, LayerQuant], device: torch.device
) -> Callable[[PackedWeight, nn.Module], nn.Module]:
    """A `build_linear` for load_into: each stored format goes to the named backend that runs it.

    layers: the checkpoint's, all checked here, before anything is read. A layer flagged
    full_precision_matrix_mult is dequantised whatever is named (8.1). ValueError for an unknown
    name and for two names that run one format; Unavailable for a format that none of them runs and
    for a backend that this device cannot run.
    """
    by_format = _by_format(names)
    builds: dict[str, Callable[[PackedWeight], nn.Module]] = {}
    for layer, quant in layers.items():
        if quant.full_precision:
            builds[layer] = DequantisedLinear
            continue
        backend = by_format.get(quant.format)
        if backend is None:
            named = ", ".join(dict.fromkeys(names))
            raise Unavailable(named, f"none of them runs {quant.format} ({layer})")
        if reason := backend.reason(device):
            raise Unavailable(backend.name, reason)
        builds[layer] = backend.build
    return lambda packed, replaced: builds[packed.layer](packed)


def _by_format(names: tuple[str, ...]) -> dict[str, LinearBackend]:
    found: dict[str, LinearBackend] = {}
    for backend in map(linear_backend, names):
        for stored in backend.formats:
            other = found.setdefault(stored, backend)
            if other is not backend:
                raise ValueError(
                    f"{other.name} and {backend.name} both run {stored} layers; name one of them"
                )
    return found
