"""Elementwise steps by name; a new form is one file with `BACKEND` and a word here.

S rows, D hidden, F hidden of the MLP, T rows of an AdaLN table.
"""

from __future__ import annotations

import importlib

import torch

from runtime.kernels.elementwise.base import (
    Elementwise,
    ElementwiseBackend,
    Span,
    VaeElementwise,
)
from runtime.quoted import quoted

__all__ = [
    "BACKENDS",
    "Elementwise",
    "ElementwiseBackend",
    "Span",
    "VaeElementwise",
    "elementwise_backend",
    "load",
    "load_vae",
]

BACKENDS = ("eager", "kitchen", "triton")


def elementwise_backend(name: str) -> ElementwiseBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"elementwise must be one of {', '.join(BACKENDS)}, got {quoted(name)}")
    return importlib.import_module(f"runtime.kernels.elementwise.{name}").BACKEND


def load(name: str, device: torch.device) -> Elementwise:
    """The named steps for tensors of `device`; Unavailable says why they cannot run there."""
    return elementwise_backend(name).load(device)


def load_vae(name: str, device: torch.device) -> VaeElementwise:
    """The named steps of the video VAE's decoder; Unavailable as in `load`."""
    return elementwise_backend(name).load_vae(device)
