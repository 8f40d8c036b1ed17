"""Attention backends by name; a new one is one file with `BACKEND` and one word here."""

from __future__ import annotations

import importlib

import torch

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions, PackedRows
from runtime.kernels.unavailable import Unavailable
from runtime.quoted import quoted

__all__ = [
    "BACKENDS",
    "Attend",
    "AttentionBackend",
    "AttentionOptions",
    "PackedRows",
    "attention_backend",
    "load_attention",
]

BACKENDS = (
    "sdpa",
    "sdpa_cudnn",
    "sdpa_math",
    "fa4",
    "sage1",
    "sage2",
    "sage3",
    "sage3_flashinfer",
    "kj",
    "ck_int8",
    "sol",
    "sol_nvlabs",
)


def attention_backend(name: str) -> AttentionBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, got {quoted(name)}")
    return importlib.import_module(f"runtime.kernels.attention.{name}").BACKEND


def load_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    options: AttentionOptions,
    *,
    head_dim: int = 0,
) -> Attend:
    """The named backend for q, k and v of `dtype`, whose heads are head_dim wide (0: not known).

    Unavailable, with the reason, here and not when the first such tensor arrives after minutes.
    ValueError lists the known names.
    """
    backend = attention_backend(name)
    if dtype not in backend.dtypes:
        known = " and ".join(str(d).removeprefix("torch.") for d in backend.dtypes)
        raise Unavailable(name, f"it computes {known} only, a model of this plan runs in {dtype}")
    if head_dim and backend.head_dims and head_dim not in backend.head_dims:
        known = " and ".join(map(str, backend.head_dims))
        raise Unavailable(name, f"its kernels take head dims {known}, this model has {head_dim}")
    return backend.load(device, options)
