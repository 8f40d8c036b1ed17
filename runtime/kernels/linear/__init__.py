"""Linear backends by name; a new one is one file with `BACKEND` and one word here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container, Mapping

import torch
from torch import nn

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear.base import LinearBackend
from runtime.kernels.linear.dense import widened
from runtime.kernels.linear.dequant import DequantisedLinear
from runtime.kernels.unavailable import Unavailable
from runtime.quoted import quoted

__all__ = ["BACKENDS", "LinearBackend", "linear_backend", "linear_builder"]

BACKENDS = (
    "dense",
    "quack",
    "fp8_rowwise",
    "fp8_tensorwise",
    "nvfp4_dequant",
    "nvfp4_native",
    "nvfp4_kitchen_fallback",
    "fp8_dequant",
    "fp8_native",
    "int8_convrot",
    "int8_dequant",
)


def linear_backend(name: str) -> LinearBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"linear backend must be one of {', '.join(BACKENDS)}, got {quoted(name)}")
    return importlib.import_module(f"runtime.kernels.linear.{name}").BACKEND


def linear_builder(
    names: Mapping[str, str],
    layers: Mapping[str, LayerQuant],
    device: torch.device,
    *,
    narrow: Container[str] = (),
    cached: Callable[[str], torch.dtype] | None = None,
) -> Callable[[PackedWeight, nn.Module], nn.Module]:
    """A `build_linear` for load_into: each stored format goes to the backend that `names` gives it.

    names: stored format (UNQUANTISED for none) to backend. layers: those to build, all checked
    here, before anything is read. A layer flagged full_precision_matrix_mult is dequantised
    whatever is named (8.1), and so is one outside `narrow` whose backend rounds weights again.
    cached: the dtype of a layer's activations; weights to be dequantised are widened at load and
    stay so. ValueError for an unknown name; Unavailable for a format without a backend, for one
    that its backend does not run, and for a backend that this device cannot run.
    """
    backends = {stored: linear_backend(name) for stored, name in names.items()}
    builds: dict[str, Callable[[PackedWeight], nn.Module]] = {}
    for layer, quant in layers.items():
        build = _build(backends, layer, quant, device, layer in narrow)
        if build is DequantisedLinear and cached is not None:
            build = functools.partial(widened, dtype=cached(layer))
        builds[layer] = build
    return lambda packed, replaced: builds[packed.layer](packed)


def _build(
    backends: Mapping[str, LinearBackend],
    layer: str,
    quant: LayerQuant,
    device: torch.device,
    narrow: bool,
) -> Callable[[PackedWeight], nn.Module]:
    if quant.full_precision:
        return DequantisedLinear
    backend = backends.get(quant.format)
    if backend is None:
        known = ", ".join(backends)
        raise Unavailable("linear", f"layer {layer} is {quant.format}, allowed are {known}")
    if quant.format not in backend.formats:
        raise Unavailable(
            backend.name,
            f"layer {layer} is {quant.format}, and it runs {', '.join(backend.formats)}",
        )
    if reason := backend.reason(device):
        raise Unavailable(backend.name, reason)
    return DequantisedLinear if backend.narrows and not narrow else backend.build
