"""How many steps a schedule really runs, told without torch and scipy before the run."""

from __future__ import annotations

import math
from bisect import bisect_right

_ROWS = 999  # highest row of the model's sigma table
_SHAPE = 0.6  # alpha and beta of the schedule named beta
_MOST_ITERATIONS = 200
_SMALL = 1e-15


def steps_run(scheduler: str, steps: int) -> int:
    """The steps that will run: beta picks rows of the sigma table and drops repeated ones."""
    if scheduler != "beta":
        return steps
    edges = [_share_below((row + 0.5) / _ROWS) for row in range(_ROWS)]
    return len({bisect_right(edges, 1 - i / steps) for i in range(steps)})


def _share_below(x: float) -> float:
    """The beta distribution's cumulative share up to x, 0 < x < 1; exactly 0.5 in the middle."""
    if x >= 0.5:
        return 0.5 if x == 0.5 else 1 - _share_below(1 - x)
    log_beta = 2 * math.lgamma(_SHAPE) - math.lgamma(2 * _SHAPE)
    front = math.exp(_SHAPE * (math.log(x) + math.log1p(-x)) - log_beta) / _SHAPE
    return front * _fraction(x)


def _fraction(x: float) -> float:
    """The continued fraction of the incomplete beta function (Lentz); converges for x < 0.5."""
    d = 1 / (1 - x * (2 * _SHAPE) / (_SHAPE + 1))
    c, value = 1.0, d
    for m in range(1, _MOST_ITERATIONS):
        twice = _SHAPE + 2 * m
        even = m * (_SHAPE - m) * x / ((twice - 1) * twice)
        odd = -(_SHAPE + m) * (2 * _SHAPE + m) * x / (twice * (twice + 1))
        for part in (even, odd):
            d = 1 / (1 + part * d)
            c = 1 + part / c
            value *= c * d
        if abs(c * d - 1) < _SMALL:
            break
    return value
