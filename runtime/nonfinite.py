"""The error that stops a run when a tensor is no longer finite: it names stage and tensor."""

from __future__ import annotations

import torch
from torch import Tensor


class NonFinite(ValueError):
    """A stage produced NaN or infinity; nothing after it is worth computing."""

    def __init__(self, stage: str, tensor: str) -> None:
        super().__init__(f"{stage} produced non-finite values in {tensor}; the run was stopped")
        self.stage = stage
        self.tensor = tensor


def require_finite(value: Tensor, *, stage: str, tensor: str) -> None:
    """Raise NonFinite unless every element is finite (one synchronisation on a GPU)."""
    if not bool(torch.isfinite(value).all()):
        raise NonFinite(stage, tensor)
