"""What a step cache is: state of one side of one request that answers some steps unevaluated.

A cache is given a model evaluation in pieces and knows no model. Streams are (video, audio) rows;
both have their own gate, and a step is skipped only if both allow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Streams = tuple[Tensor, Tensor]  # video rows, audio rows
Pair = tuple[float, float]  # a measure of the video, of the audio
Kind = Literal["computed", "reused", "forecast"]
COMPUTED: Kind = "computed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of a model, in pieces that are called in this order and at most once.

    rows: what the model is asked about. begin() -> packed rows [S, D]; blocks(x, start, stop) runs
    [start, stop) of num_blocks and may write into x; targets(x) -> views of the rows of both
    streams; end(*targets) -> predictions, of the shapes of `rows`, in noise-ward direction.
    """

    rows: Streams
    num_blocks: int
    begin: Callable[[], Tensor]
    blocks: Callable[[Tensor, int, int], Tensor]
    targets: Callable[[Tensor], Streams]
    end: Callable[[Tensor, Tensor], Streams]

    def features(self) -> Streams:
        """Views of the target rows after the last block, everything computed."""
        return self.targets(self.blocks(self.begin(), 0, self.num_blocks))

    def whole(self) -> Streams:
        """The predictions, everything computed."""
        return self.end(*self.features())


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a step may be skipped at all.

    threshold: of the method's own measure, for each stream. warmup: first steps that are always
    computed. max_run: most steps skipped in a row.
    """

    threshold: float
    warmup: int
    max_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """How a step was answered; change: the gate's measure, None where there was none yet."""

    kind: Kind
    change: Pair | None = None


class StepState(Protocol):
    """The cache of one side of one request; asked once per step, in order."""

    def step(self, evaluation: Evaluation, *, may_skip: bool) -> tuple[Streams, StepOutcome]:
        """Predictions of this step; without `may_skip` they are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCache:
    """One file of this folder. own: the limits where a plan says 0.

    state(limits, number of steps) makes a fresh state for one side of one request.
    """

    name: str
    own: Limits
    state: Callable[[Limits, int], StepState]


class Turns:
    """Counts steps: the first ones, the last one and every one after a full run are computed."""

    def __init__(self, limits: Limits, num_steps: int) -> None:
        self._limits, self._num_steps = limits, num_steps
        self.step = self._run = 0

    def may_skip(self) -> bool:
        """May the step that comes now be skipped?"""
        first = self.step < max(1, self._limits.warmup)
        return not first and self.step < self._num_steps - 1 and self._run < self._limits.max_run

    def took(self, kind: Kind) -> None:
        """The step ended so."""
        self.step += 1
        self._run = 0 if kind == COMPUTED else self._run + 1


def kept(streams: Streams) -> Streams:
    """Copies: blocks write into their rows, and a view would change with them."""
    video, audio = streams
    return video.clone(), audio.clone()


def difference(new: Streams, old: Streams) -> Streams:
    """new - old, in tensors of their own."""
    return new[0] - old[0], new[1] - old[1]


def relative_change(new: Streams, old: Streams) -> Pair:
    """mean|new - old| / mean|old| of each stream; NaN where old is nothing but zeros."""
    video, audio, of_video, of_audio = mean_size(*difference(new, old), *old)
    return ratio(video, of_video), ratio(audio, of_audio)


def mean_size(*tensors: Tensor) -> list[float]:
    """mean|x| of each, reduced in fp32; one wait for the device."""
    means = [x.abs().mean(dtype=torch.float32) for x in tensors]
    sizes: list[float] = torch.stack(means).tolist()
    return sizes


def ratio(a: float, b: float) -> float:
    """a / b, and NaN for a divisor of zero: no gate lets that pass."""
    return a / b if b else math.nan


def within(measures: Pair | None, threshold: float) -> bool:
    """Do both streams allow a skip? Never without a measure, nor for NaN."""
    return measures is not None and all(m <= threshold for m in measures)
