"""Spectrum: the rows after the last block are forecast from those of computed steps.

The published idea (Spectrum; for H3 github.com/xmarre/ComfyUI-Spectrum-MiniMax-H3): every feature
is a smooth function of the step, so a few Chebyshev polynomials fitted to its past give its next
value, and only the head runs. Own code and own constants. Step i of n stands at t = 2i/(n-1) - 1,
phi(t) = (T_0(t) .. T_M(t)), and over the last K computed steps at t_1 .. t_K, with features h_k,

    h(t) = sum_k w_k h_k,   w = phi(t) (Phi'Phi + ridge I0)^-1 Phi',   M = min(3, max(1, K - 2))

I0 leaves T_0 out: what stands still is forecast exactly. w is the same for all features, so a
forecast is one weighted sum of K snapshots. The gate is ours: at a computed step the forecast from
the steps before it is compared with what was computed, mean|forecast - h| / mean|h|, and forecasts
follow only while that is within the threshold for video and for audio. 11 of 20 steps are
computed if the gate lets everything pass. Threshold and ridge are not from measurements with real
weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.polynomial.chebyshev import chebvander
from torch import Tensor

from runtime.caches.base import (
    COMPUTED,
    Evaluation,
    Limits,
    Pair,
    StepCache,
    StepOutcome,
    Streams,
    kept,
    relative_change,
    within,
)

DEGREE = 3
RIDGE = 1e-3
WINDOW = 6  # snapshots of both streams


def forecast_weights(
    past: Sequence[float], at: float, *, degree: int = DEGREE, ridge: float = RIDGE
) -> tuple[float, ...]:
    """How much each of the past values counts for the one at `at`; positions lie in [-1, 1].

    With ridge 0 it is exact for polynomials of that degree, which takes degree + 1 past positions.
    """
    basis = chebvander(np.asarray(past, dtype=np.float64), degree)
    penalty = np.diag([0.0] + [ridge] * degree)
    here = chebvander(np.asarray([at], dtype=np.float64), degree)[0]
    weights = here @ np.linalg.solve(basis.T @ basis + penalty, basis.T)
    return tuple(float(w) for w in weights)


class _State:
    def __init__(self, limits: Limits, num_steps: int) -> None:
        self._threshold, self._span = limits.threshold, max(1, num_steps - 1)
        self._past: deque[tuple[float, Streams]] = deque(maxlen=WINDOW)
        self._index = 0
        self._error: Pair | None = None  # of a forecast of the last computed step

    def step(self, evaluation: Evaluation, *, may_skip: bool) -> tuple[Streams, StepOutcome]:
        at = 2 * self._index / self._span - 1
        self._index += 1
        if may_skip and within(self._error, self._threshold):
            predictions = evaluation.end(*self._forecast(at))
            return predictions, StepOutcome(kind="forecast", change=self._error)
        features = evaluation.features()
        if len(self._past) > 1:
            self._error = relative_change(self._forecast(at), features)
        self._past.append((at, kept(features)))
        return evaluation.end(*features), StepOutcome(kind=COMPUTED, change=self._error)

    def _forecast(self, at: float) -> Streams:
        degree = min(DEGREE, max(1, len(self._past) - 2))
        weights = forecast_weights([t for t, _ in self._past], at, degree=degree)
        video, audio = (
            _weighted([streams[s] for _, streams in self._past], weights) for s in (0, 1)
        )
        return video, audio


def _weighted(snapshots: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Summed in fp32, in the snapshots' dtype."""
    total = torch.zeros_like(snapshots[0], dtype=torch.float32)
    for snapshot, weight in zip(snapshots, weights, strict=True):
        total.add_(snapshot, alpha=weight)
    return total.to(snapshots[0].dtype)


CACHE = StepCache(name="spectrum", own=Limits(threshold=0.1, warmup=6, max_run=2), state=_State)
