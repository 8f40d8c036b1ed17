"""Seconds per stage of one rank: CUDA events on a GPU, a monotonic clock on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from runtime.messages import StageTime
from runtime.meter import Call, Mark, Ranges, StepMeter, mark, seconds_between, unnamed

T = TypeVar("T")

LOAD = "load"
TEXT_ENCODE = "text encode"
REFERENCE_ENCODE = "reference encode"
DENOISE = "denoise"  # one record per step
UPSAMPLE = "latent upsample"  # of a family with two stages of steps
VIDEO_VAE_DECODE = "video VAE decode"
AUDIO_VAE_DECODE = "audio VAE decode"
MUX = "mux"
END_TO_END = "end to end"

STAGES = (
    LOAD,
    TEXT_ENCODE,
    REFERENCE_ENCODE,
    DENOISE,
    UPSAMPLE,
    VIDEO_VAE_DECODE,
    AUDIO_VAE_DECODE,
    MUX,
    END_TO_END,
)


# Told of each stage that begins or ends: its name, its step (-1 for none), does it begin?
Watched = Callable[[str, int, bool], None]


def unwatched(stage: str, step: int, begins: bool) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    stage: str
    step: int
    start: Mark
    end: Mark
    depth: int
    peak_bytes: int
    inner: tuple[_Span, ...] = ()  # stages inside this one whose time is not its own
    meter: StepMeter | None = None
    calls: tuple[Call, ...] = ()

    def finished(self) -> bool:
        return isinstance(self.end, float) or self.end.query()

    def seconds(self) -> float:
        return self._total() - sum(span._total() for span in self.inner)

    def _total(self) -> float:
        return seconds_between(self.start, self.end)


class _Memory:
    """Most device bytes in use since each open stage began, and since the request did."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open = [0]  # the request's, then those of the open stages
        self._reset()

    def begin(self) -> None:
        self._look()
        self._reset()
        self._open.append(0)

    def end(self) -> int:
        self._look()
        return self._open.pop()

    def most(self) -> int:
        self._look()
        return self._open[0]

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _look(self) -> None:
        """What was reached since the last reset counts for everything that is open."""
        if self._device.type == "cuda":
            reached = torch.cuda.max_memory_allocated(self._device)
            self._open = [max(peak, reached) for peak in self._open]


class StageClock:
    """Collects the stages of one request; stages may be nested, and one never waits for the GPU.

    It begins with the request: every start counts from there. `failed` names the innermost stage
    that an exception left ("denoise, step 3"), else it is "". Between two stages it is the one
    before. `ranges` names each stage to a profiler.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        rank: int = 0,
        ranges: Ranges = unnamed,
        watched: Watched = unwatched,
    ) -> None:
        self.failed = ""
        self._watched = watched
        self._device = torch.device(device)
        self.rank = rank
        self._ranges = ranges
        self._spans: list[_Span] = []
        self._times: list[StageTime] = []
        self._heard: deque[StageTime] = deque()
        self._drained = 0
        self._depth = 0
        self._entered = ""
        self._memory = _Memory(self._device)
        self._began = mark(self._device)

    @contextmanager
    def stage(
        self,
        name: str,
        *,
        step: int = -1,
        exclusive: bool = False,
        meter: StepMeter | None = None,
    ) -> Iterator[None]:
        """Times the block as stage `name`, one of STAGES; `step` counts from 0, -1 is no step.

        exclusive: the stages nested in the block are taken out of its time (frames are decoded
        while the file is written, and the two are reported apart).
        meter: what it has wrapped is reported as the PARTS of this step, and ALL_COMMUNICATION
        where ranks talk.
        """
        assert name in STAGES, f"stage {name!r} is not one of {', '.join(STAGES)}"
        self._watched(name, step, True)
        self._memory.begin()
        start, first = mark(self._device), len(self._spans)
        self._depth += 1
        label = name if step < 0 else f"{name}, step {step + 1}"
        if name != END_TO_END:
            self._entered = label
        if meter is not None:
            meter.open()
        calls: tuple[Call, ...] = ()
        try:
            with self._ranges(label):
                yield
        except BaseException:
            between = name == END_TO_END and self._entered  # no stage was open within it
            self.failed = self.failed or between or label
            raise
        else:
            end = mark(self._device)
        finally:
            self._depth -= 1
            peak = self._memory.end()
            if meter is not None:
                calls = meter.close()
            self._watched(name, step, False)
        nested = [s for s in self._spans[first:] if exclusive and s.depth == self._depth + 1]
        span = _Span(
            stage=name,
            step=step,
            start=start,
            end=end,
            depth=self._depth,
            peak_bytes=peak,
            inner=tuple(nested),
            meter=meter,
            calls=calls,
        )
        self._spans.append(span)

    def each(self, name: str, made: Iterator[T]) -> Iterator[T]:
        """What is made, piece by piece: only the making counts as stage `name`."""
        while True:
            with self.stage(name):
                piece = next(made, None)
            if piece is None:
                return
            yield piece

    def drain(self) -> list[StageTime]:
        """The stages that have finished on the device since the last call, without waiting.

        Those of other ranks are among them, once they have been heard.
        """
        fresh: list[StageTime] = []
        while self._heard:
            fresh.append(self._heard.popleft())
        while self._drained < len(self._spans) and self._spans[self._drained].finished():
            fresh += self._read(self._spans[self._drained])
            self._drained += 1
        self._times += fresh
        return fresh

    def hear(self, others: Iterable[StageTime]) -> None:
        """Takes in what other ranks measured of this request: each began when it heard of it."""
        self._heard.extend(others)

    def times(self) -> tuple[StageTime, ...]:
        """Every stage so far in the order they ended; waits for the device once."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.drain()
        return tuple(self._times)

    def peak_bytes(self) -> int:
        """Most device memory in use at once since the request began; 0 on the CPU."""
        return self._memory.most()

    def _read(self, span: _Span) -> Iterator[StageTime]:
        """The stage, then the parts of a metered one."""
        seconds = span.seconds()
        parts = span.meter.read(span.calls, seconds) if span.meter is not None else {}
        for stage, length in ((span.stage, seconds), *parts.items()):
            yield StageTime(
                stage=stage,
                seconds=length,
                rank=self.rank,
                step=span.step,
                start=seconds_between(self._began, span.start),
                peak_bytes=span.peak_bytes if stage == span.stage else 0,
            )
