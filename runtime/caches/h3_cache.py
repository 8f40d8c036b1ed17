"""H3-Cache: when the first block changed its rows as before, the rest is taken from before.

First-block caching with a gate per stream, from the description of
github.com/bt420000-collab/MiniMax-H3-Cache-Native; own code. With x the rows after block 1, f those
before it, and R = (rows after the last block) - x of the last computed step:

    change = mean|(x - f) - (x' - f')| / mean|x' - f'|      x', f': of the last computed step
    skipped if change <= threshold for video and for audio: rows after the last block = x + R

Its SAFE setting is the default (threshold .09, 4 steps of warm-up, runs of 1); BALANCED has .10,
AGGRESSIVE .12 and runs of 2. Only target rows are kept, since only they leave the model.
"""

from __future__ import annotations

from runtime.caches.base import (
    COMPUTED,
    Evaluation,
    Limits,
    StepCache,
    StepOutcome,
    Streams,
    difference,
    kept,
    relative_change,
    within,
)


class _State:
    def __init__(self, limits: Limits, num_steps: int) -> None:
        del num_steps
        self._threshold = limits.threshold
        self._first: Streams | None = None  # what block 1 added, at the last computed step
        self._rest: Streams | None = None  # what the blocks after it added

    def step(self, evaluation: Evaluation, *, may_skip: bool) -> tuple[Streams, StepOutcome]:
        x = evaluation.begin()
        before = kept(evaluation.targets(x))
        x = evaluation.blocks(x, 0, 1)
        after = kept(evaluation.targets(x))
        first = difference(after, before)
        del before  # not alive while the blocks run: it would be a copy more at the peak
        change = None if self._first is None else relative_change(first, self._first)
        if may_skip and self._rest is not None and within(change, self._threshold):
            video, audio = (a + r for a, r in zip(after, self._rest, strict=True))
            return evaluation.end(video, audio), StepOutcome(kind="reused", change=change)
        features = evaluation.targets(evaluation.blocks(x, 1, evaluation.num_blocks))
        self._first, self._rest = first, difference(features, after)
        return evaluation.end(*features), StepOutcome(kind=COMPUTED, change=change)


CACHE = StepCache(name="h3_cache", own=Limits(threshold=0.09, warmup=4, max_run=1), state=_State)
