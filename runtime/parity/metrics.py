"""How two tensors are compared: bit equality first, then the figures of the tolerance table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Unsupported(Exception):
    """The golden needs something the runtime does not offer; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One compared tensor. `run` is "free" (from in/* and the prompt) or "staged" (stored inputs)."""

    name: str
    run: str
    stage: str
    equal: bool
    max_abs: float
    relative_l2: float
    problem: str = ""  # shape or dtype mismatch, non-finite values: never within a tolerance


def compare(name: str, got: Tensor, want: Tensor, *, run: str, stage: str) -> Comparison:
    """Compare in float64 on the CPU; NaN at equal places counts as equal bits only if both are NaN."""
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.shape != want.shape:
        problem = f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    elif got.dtype != want.dtype:
        problem = f"dtype {got.dtype} for {want.dtype}"
    else:
        problem = ""
    if problem:
        return Comparison(
            name=name, run=run, stage=stage, equal=False,
            max_abs=float("inf"), relative_l2=float("inf"), problem=problem,
        )  # fmt: skip
    if torch.equal(got, want):
        return Comparison(name=name, run=run, stage=stage, equal=True, max_abs=0.0, relative_l2=0.0)
    a, b = got.double(), want.double()
    difference = (a - b).abs()
    finite = bool(torch.isfinite(a).all())
    norm = float(b.norm())
    relative = float(difference.norm()) / norm if norm > 0 else float("inf")
    return Comparison(
        name=name, run=run, stage=stage, equal=False,
        max_abs=float(difference.max()), relative_l2=relative,
        problem="" if finite else "non-finite values",
    )  # fmt: skip
