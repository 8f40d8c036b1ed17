"""Attention backends by name; a new one is one file with `BACKEND` and one word here."""

from __future__ import annotations

import importlib

from runtime.kernels.attention.base import Attend, AttentionBackend

__all__ = ["BACKENDS", "Attend", "AttentionBackend", "attention_backend"]

BACKENDS = ("sdpa", "sdpa_cudnn", "sage2")


def attention_backend(name: str) -> AttentionBackend:
    """The backend of that name; ValueError lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, got {name!r}")
    return importlib.import_module(f"runtime.kernels.attention.{name}").BACKEND
