"""EasyCache: the model is left out while its output is expected to have changed little.

From Zhou et al., "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive
Caching" (2025), own code, with every stream measured by itself. x are the rows that the model is
asked about, v its noise-ward predictions, i the last computed step and j the one before it:

    k = mean|v_i - v_j| / mean|x_i - x_j|               how fast the output follows the input
    change += k * mean|x - x_before| / mean|v_i|        at every step since i
    skipped while change <= threshold, for video and for audio: v = v_i + (x - x_i)

The threshold 0.2 is ComfyUI's, which measures the video alone. The method has no limit on a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.caches.base import (
    COMPUTED,
    Evaluation,
    Limits,
    Pair,
    StepCache,
    StepOutcome,
    Streams,
    difference,
    kept,
    mean_size,
    ratio,
    within,
)

_UNLIMITED = 1000  # steps: the most that a request has


@dataclass(frozen=True, slots=True)
class _Step:
    """A computed step: input, output, mean|output|, and how fast it follows the input."""

    rows: Streams
    out: Streams
    size: Pair
    rate: Pair | None


class _State:
    def __init__(self, limits: Limits, num_steps: int) -> None:
        del num_steps
        self._threshold = limits.threshold
        self._last: _Step | None = None
        self._before: Streams | None = None  # the input of the step before this one
        self._change: Pair | None = None

    def step(self, evaluation: Evaluation, *, may_skip: bool) -> tuple[Streams, StepOutcome]:
        rows = kept(evaluation.rows)
        change = self._expect(rows)
        self._before, self._change = rows, change
        if may_skip and self._last is not None and within(change, self._threshold):
            moved = difference(rows, self._last.rows)
            video, audio = (v + dx for v, dx in zip(self._last.out, moved, strict=True))
            return (video, audio), StepOutcome(kind="reused", change=change)
        out = evaluation.whole()
        self._remember(rows, kept(out))
        return out, StepOutcome(kind=COMPUTED, change=change)

    def _expect(self, rows: Streams) -> Pair | None:
        """The expected change with this step's; None before there is a rate."""
        if self._last is None or self._last.rate is None or self._before is None:
            return None
        video, audio = mean_size(*difference(rows, self._before))
        rate, size, so_far = self._last.rate, self._last.size, self._change or (0.0, 0.0)
        return (
            so_far[0] + ratio(rate[0] * video, size[0]),
            so_far[1] + ratio(rate[1] * audio, size[1]),
        )

    def _remember(self, rows: Streams, out: Streams) -> None:
        video, audio = mean_size(*out)
        rate = None
        if self._last is not None:
            followed = mean_size(*difference(out, self._last.out))
            moved = mean_size(*difference(rows, self._last.rows))
            rate = ratio(followed[0], moved[0]), ratio(followed[1], moved[1])
        self._last = _Step(rows, out, (video, audio), rate)
        self._change = None


CACHE = StepCache(
    name="easy_cache", own=Limits(threshold=0.2, warmup=2, max_run=_UNLIMITED), state=_State
)
