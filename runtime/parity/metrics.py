"""How two tensors are compared: bit equality first, then the figures of the tolerance table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PIXELS = ("decode/video", "out/video")  # values in [0,1]


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
    relative_max: float  # max_abs over the golden's largest value
    mean_abs: float
    cosine: float  # 1 when equal; NaN where either side is all zeros
    psnr: float  # dB; infinite when equal; peak 1.0 for pixels, else the golden's value range
    problem: str = ""  # shape or dtype mismatch, non-finite values: never within a tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Distance:
    max_abs: float
    mean_abs: float
    relative_l2: float
    relative_max: float
    cosine: float
    psnr: float


_NONE = _Distance(
    max_abs=0.0, mean_abs=0.0, relative_l2=0.0, relative_max=0.0, cosine=1.0, psnr=math.inf
)
_BEYOND = _Distance(
    max_abs=math.inf,
    mean_abs=math.inf,
    relative_l2=math.inf,
    relative_max=math.inf,
    cosine=math.nan,
    psnr=-math.inf,
)


def compare(name: str, got: Tensor, want: Tensor, *, run: str, stage: str) -> Comparison:
    """Bit for bit, else in float64 on the CPU; relative L2 is over the golden's norm."""
    got, want = got.detach().cpu(), want.detach().cpu()
    problem, distance = "", _NONE
    equal = False
    if got.shape != want.shape:
        problem = f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    elif got.dtype != want.dtype:
        problem = f"dtype {got.dtype} for {want.dtype}"
    elif not (equal := torch.equal(_bits(got), _bits(want))):
        peak = 1.0 if name in PIXELS else None
        distance = _distance(got.double().flatten(), want.double().flatten(), peak)
        if not math.isfinite(distance.max_abs):
            problem = "non-finite values"
    if problem:
        distance = _BEYOND
    return Comparison(
        name=name,
        run=run,
        stage=stage,
        equal=equal,
        max_abs=distance.max_abs,
        relative_l2=distance.relative_l2,
        relative_max=distance.relative_max,
        mean_abs=distance.mean_abs,
        cosine=distance.cosine,
        psnr=distance.psnr,
        problem=problem,
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _distance(got: Tensor, want: Tensor, peak: float | None) -> _Distance:
    """Of two flat float64 tensors; relative figures are infinite over a golden of zeros."""
    difference, norm = got - want, float(want.norm())
    distance = float(difference.norm())
    both = float(got.norm()) * norm
    largest, peak_of_want = float(difference.abs().max()), float(want.abs().max())
    return _Distance(
        max_abs=largest,
        mean_abs=float(difference.abs().mean()),
        relative_l2=distance / norm if norm > 0 else math.inf if distance > 0 else 0.0,
        relative_max=largest / peak_of_want if norm > 0 else math.inf if distance > 0 else 0.0,
        cosine=min(1.0, float(got @ want) / both) if both > 0 else math.nan,
        psnr=_psnr(float(want.max() - want.min()) if peak is None else peak, difference),
    )


def _psnr(peak: float, difference: Tensor) -> float:
    error = float(difference.square().mean())
    if error == 0:
        return math.inf
    if not 0 < peak < math.inf or error == math.inf:
        return -math.inf
    return 10 * math.log10(peak**2 / error)
