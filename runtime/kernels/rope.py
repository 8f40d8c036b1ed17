"""The rotation tables of the denoiser's attention (contract 1.14)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(angles_SR: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, S, 1, R, 2, 2] rotation matrices [[cos, -sin], [sin, cos]], rounded to dtype (1.14)."""
    cos, sin = angles_SR.cos(), angles_SR.sin()
    rows, pairs = angles_SR.shape
    matrices = torch.stack([cos, -sin, sin, cos], dim=-1).reshape(1, rows, 1, pairs, 2, 2)
    return matrices.to(dtype)
