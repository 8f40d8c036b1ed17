"""Life signs of several ranks: each tells that it lives and how far it is; the engine judges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from runtime.messages import Beat

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # the least that a rank may be silent
SLOW_STEPS = 3.0  # times the last step
START_SECONDS = 120.0  # Python and torch are read from a cold disk before the first beat
FIRST_STEP_SECONDS = 600.0  # kernels are compiled and graphs captured in it
_MISSED = 2.5  # seconds of silence: of those whose step does not end, the one that stands still


class Heart:
    """A thread of a rank that beats while a command is served; steps are beats of their own."""

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self._send = send
        self._beat = Beat()
        self._began = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def stage(self, step: int) -> None:
        """A stage begins; step counts from 0, -1 is none of denoising."""
        now = time.monotonic()
        seconds = now - self._began if self._beat.in_step else self._beat.seconds
        more = int(step >= 0)
        self._beat = Beat(steps=self._beat.steps + more, in_step=step >= 0, seconds=seconds)
        self._began = now
        self._send(self._beat)

    def _run(self) -> None:
        with suppress(OSError):  # the console has gone
            while not self._stop.wait(BEAT_SECONDS):
                self._send(self._beat)


class Pulse:
    """When each rank was last heard, and since when it is in its step."""

    def __init__(self, ranks: int, silence_seconds: float, first_seconds: float) -> None:
        """first_seconds: until the first sign of each."""
        self._least = silence_seconds
        self._first = first_seconds
        self._known: set[int] = set()
        now = time.monotonic()
        self._heard = [now] * ranks
        self._beats = [Beat()] * ranks
        self._began = [now] * ranks

    def hear(self, rank: int, beat: Beat | None) -> None:
        """Anything that a rank says is a sign of life."""
        self._heard[rank] = time.monotonic()
        self._known.add(rank)
        if beat is None or beat == self._beats[rank]:
            return
        if beat.steps != self._beats[rank].steps:
            self._began[rank] = self._heard[rank]
        self._beats[rank] = beat

    def stop(self, rank: int) -> None:
        """It has left its command: it is in no step."""
        self._beats[rank] = replace(self._beats[rank], in_step=False)

    def trouble(self, working: list[int]) -> tuple[int, str] | None:
        """The rank of these that hangs, and how that was seen."""
        now = time.monotonic()
        silent = {rank: now - self._heard[rank] for rank in working}
        for rank, seconds in silent.items():
            if seconds > self._limit(rank):
                return rank, f"rank {rank} hung (silent for {seconds:.0f} s)"
        for rank in working:
            seconds = now - self._began[rank]
            if self._beats[rank].in_step and seconds > self._step_limit(rank):
                slowest = max(working, key=lambda r: (silent[r] // _MISSED, -self._beats[r].steps))
                return slowest, f"rank {slowest} hung (a step has not ended for {seconds:.0f} s)"
        return None

    def _limit(self, rank: int) -> float:
        if rank not in self._known:
            return max(self._first, self._least)
        return max(self._least, SLOW_STEPS * self._beats[rank].seconds)

    def _step_limit(self, rank: int) -> float:
        return self._limit(rank) if self._beats[rank].seconds else FIRST_STEP_SECONDS
