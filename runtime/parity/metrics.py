"""How two tensors are compared: bit equality first, then the figures of the tolerance table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class Unsupported(Exception):
    """The golden needs something the runtime does not offer; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One compared tensor. `run`: "free" (from in/* and the prompt) or "staged" (stored inputs)."""

    name: str
    run: str
    stage: str
    equal: bool  # same shape, dtype and bits: -0.0 is not 0.0, a NaN equals the same NaN
    max_abs: float
    relative_l2: float
    problem: str = ""  # shape or dtype mismatch, non-finite values: never within a tolerance


def compare(name: str, got: Tensor, want: Tensor, *, run: str, stage: str) -> Comparison:
    """Bit for bit, else in float64 on the CPU; relative L2 is over the golden's norm."""
    got, want = got.detach().cpu(), want.detach().cpu()
    problem, max_abs, relative = "", 0.0, 0.0
    equal = False
    if got.shape != want.shape:
        problem = f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    elif got.dtype != want.dtype:
        problem = f"dtype {got.dtype} for {want.dtype}"
    elif not (equal := torch.equal(_bits(got), _bits(want))):
        max_abs, relative = _distance(got.double(), want.double())
        if not math.isfinite(max_abs):
            problem = "non-finite values"
    if problem:
        max_abs = relative = math.inf
    return Comparison(
        name=name,
        run=run,
        stage=stage,
        equal=equal,
        max_abs=max_abs,
        relative_l2=relative,
        problem=problem,
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _distance(got: Tensor, want: Tensor) -> tuple[float, float]:
    """(largest absolute difference, relative L2): infinite over a golden of zeros."""
    difference, norm = got - want, float(want.norm())
    distance = float(difference.norm())
    relative = distance / norm if norm > 0 else math.inf if distance > 0 else 0.0
    return float(difference.abs().max()), relative
