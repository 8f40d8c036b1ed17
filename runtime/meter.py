"""Where a denoising step's time goes: attention and GEMM, measured call by call.

On a GPU a call is two CUDA events in its stream, which never wait; they are read once the step has
finished and used again. Wrapping changes no tensor: the call gets its operands as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

ATTENTION = "attention"
GEMM = "GEMM"  # linear layers whole: a quantised one unpacks its weights in it
COMMUNICATION = "communication"  # what is waited for it; 0.0 on one rank, where nothing is sent
OTHER = "other"  # the step without the three

PARTS = (ATTENTION, GEMM, COMMUNICATION, OTHER)
# While anything was under way between ranks, waited for or not, the waiting for slower ranks
# included; beside the parts, and only where something was sent.
ALL_COMMUNICATION = "all communication"

Mark = float | torch.cuda.Event  # a moment: of the CPU's clock, or of a GPU stream
Ranges = Callable[[str], AbstractContextManager[Any]]  # names what a profiler shows of the block


def unnamed(name: str) -> AbstractContextManager[None]:
    """No profiler listens."""
    return nullcontext()


def mark(device: torch.device) -> Mark:
    """Now, on the CPU's clock or in the current stream of a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Both of one device; on a GPU both have been reached."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1000


class Call(NamedTuple):  # less than half the cost of a frozen dataclass, 600 times a step
    """One measured call; `part` is one of PARTS. inside: how many of those before it ran in it.

    A transfer is a call of ALL_COMMUNICATION, in no other and with none in it.
    """

    part: str
    start: Mark
    end: Mark
    inside: int = 0


class _Transfer:
    """One that is under way; the first end counts."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark, self._start = mark, mark()
        self._end: Mark | None = None

    def ended(self) -> None:
        if self._end is None:
            self._end = self._mark()

    def call(self) -> Call | None:
        """None before its end."""
        return None if self._end is None else Call(ALL_COMMUNICATION, self._start, self._end)


def covered(calls: Sequence[Call]) -> float:
    """Seconds during which at least one of these ran; at least one, in the order they began."""
    seconds, reached, origin = 0.0, 0.0, calls[0].start
    for call in calls:
        start, end = (seconds_between(origin, mark) for mark in (call.start, call.end))
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def _unmeasured() -> None:
    """No step is open."""


class StepMeter:
    """Measures the wrapped callables of one model while a step is open; outside it they just run.

    One thread opens and closes steps; `read` may be called from another. `ranges` names each call.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.ranges: Ranges = unnamed
        cuda = torch.device(device).type == "cuda"
        self._mark: Callable[[], Mark] = self._event if cuda else time.perf_counter
        self._calls: list[Call] | None = None
        self._transfers: list[_Transfer] = []
        self._free: list[torch.cuda.Event] = []

    def wrap(self, part: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same callable, measured as `part`; what it calls may be measured as another part."""
        assert part in PARTS, f"{part!r} is not one of {', '.join(PARTS)}"

        def measured(*operands: Tensor) -> Tensor:
            calls = self._calls
            if calls is None:
                return call(*operands)
            before, start = len(calls), self._mark()
            with self.ranges(part):
                result = call(*operands)
            calls.append(Call(part, start, self._mark(), len(calls) - before))
            return result

        return measured

    def transfer(self) -> Callable[[], None]:
        """A transfer begins where the current stream is; to be called where it ends, once or more.

        On the CPU the end may come from another thread.
        """
        if self._calls is None:
            return _unmeasured
        self._transfers.append(_Transfer(self._mark))
        return self._transfers[-1].ended

    def open(self) -> None:
        """A step begins."""
        self._calls, self._transfers = [], []

    def close(self) -> tuple[Call, ...]:
        """The step ends; its calls, to be handed to `read` once the device has done them.

        Of a step that failed, transfers that have not ended are left out.
        """
        calls, self._calls = self._calls or [], None
        transfers, self._transfers = (transfer.call() for transfer in self._transfers), []
        return (*calls, *(call for call in transfers if call is not None))

    def read(self, calls: Iterable[Call], step_seconds: float) -> dict[str, float]:
        """Seconds of every part of a step that took `step_seconds`; its events are free again."""
        seconds = dict.fromkeys(PARTS, 0.0)
        outermost: list[tuple[int, float]] = []  # so far: how many calls each is, how long it took
        transfers: list[Call] = []
        for call in calls:
            if call.part == ALL_COMMUNICATION:
                transfers.append(call)
                continue
            took, inside, left = seconds_between(call.start, call.end), 0.0, call.inside
            while left:
                count, of_it = outermost.pop()
                inside, left = inside + of_it, left - count
            seconds[call.part] += took - inside
            outermost.append((call.inside + 1, took))
            self._release(call)
        # A GPU's events are rounded to 0.5 us: a step that is all GEMM could fall below zero.
        seconds[OTHER] = max(0.0, step_seconds - sum(seconds.values()))
        if transfers:
            seconds[ALL_COMMUNICATION] = covered(transfers)
        for transfer in transfers:
            self._release(transfer)
        return seconds

    def _release(self, call: Call) -> None:
        self._free += [e for e in (call.start, call.end) if isinstance(e, torch.cuda.Event)]

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event
