"""Seconds per stage of one rank: CUDA events on a GPU, a monotonic clock on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from runtime.messages import StageTime

LOAD = "load"
TEXT_ENCODE = "text encode"
REFERENCE_ENCODE = "reference encode"
DENOISE = "denoise"  # one record per step
VIDEO_VAE_DECODE = "video VAE decode"
AUDIO_VAE_DECODE = "audio VAE decode"
MUX = "mux"
END_TO_END = "end to end"

STAGES = (
    LOAD,
    TEXT_ENCODE,
    REFERENCE_ENCODE,
    DENOISE,
    VIDEO_VAE_DECODE,
    AUDIO_VAE_DECODE,
    MUX,
    END_TO_END,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    stage: str
    step: int
    start: float | torch.cuda.Event
    end: float | torch.cuda.Event
    depth: int
    inner: tuple[_Span, ...] = ()  # stages inside this one whose time is not its own

    def finished(self) -> bool:
        return isinstance(self.end, float) or self.end.query()

    def seconds(self) -> float:
        return self._total() - sum(span._total() for span in self.inner)

    def _total(self) -> float:
        if isinstance(self.start, float) and isinstance(self.end, float):
            return self.end - self.start
        assert isinstance(self.start, torch.cuda.Event) and isinstance(self.end, torch.cuda.Event)
        return self.start.elapsed_time(self.end) / 1000


class StageClock:
    """Collects the stages of one request; stages may be nested, and one never waits for the GPU.

    `failed` names the innermost stage that an exception left ("denoise, step 3"), else it is "".
    Between two stages it is the one before.
    """

    def __init__(self, device: torch.device | str = "cpu", *, rank: int = 0) -> None:
        self.failed = ""
        self._cuda = torch.device(device).type == "cuda"
        self._rank = rank
        self._spans: list[_Span] = []
        self._drained = 0
        self._depth = 0
        self._entered = ""

    @contextmanager
    def stage(self, name: str, *, step: int = -1, exclusive: bool = False) -> Iterator[None]:
        """Times the block as stage `name`, one of STAGES; `step` counts from 0, -1 is no step.

        exclusive: the stages nested in the block are taken out of its time (frames are decoded
        while the file is written, and the two are reported apart).
        """
        assert name in STAGES, f"stage {name!r} is not one of {', '.join(STAGES)}"
        start, first = self._now(), len(self._spans)
        self._depth += 1
        label = name if step < 0 else f"{name}, step {step + 1}"
        if name != END_TO_END:
            self._entered = label
        try:
            yield
        except BaseException:
            between = name == END_TO_END and self._entered  # no stage was open within it
            self.failed = self.failed or between or label
            raise
        finally:
            self._depth -= 1
        nested = [s for s in self._spans[first:] if exclusive and s.depth == self._depth + 1]
        span = _Span(
            stage=name,
            step=step,
            start=start,
            end=self._now(),
            depth=self._depth,
            inner=tuple(nested),
        )
        self._spans.append(span)

    def drain(self) -> list[StageTime]:
        """The stages that have finished on the device since the last call, without waiting."""
        fresh = []
        while self._drained < len(self._spans) and self._spans[self._drained].finished():
            fresh.append(self._record(self._spans[self._drained]))
            self._drained += 1
        return fresh

    def times(self) -> tuple[StageTime, ...]:
        """Every stage so far in the order they ended; waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        return tuple(self._record(span) for span in self._spans)

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _record(self, span: _Span) -> StageTime:
        return StageTime(stage=span.stage, seconds=span.seconds(), rank=self._rank, step=span.step)
