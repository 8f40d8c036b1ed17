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
FIRST_STEP_SECONDS = 600.0  # kernels are compiled and graphs captured in it; of a tile too
LEAST_TILES = 3.0  # times the least silence, for a tile
SLOW_TILES = 5.0  # times the slowest so far
_MISSED = 2.5  # seconds of silence: of those whose step does not end, the one that stands still
_LOOK_SECONDS = 2 * BEAT_SECONDS  # the engine looks once a beat: longer, and it stood still itself


class Heart:
    """A thread of a rank that beats while a command is served; steps are beats of their own.

    tiles: the stage of the video VAE's decode, each of which is one piece of it.
    """

    def __init__(self, send: Callable[[Beat], None], tiles: str) -> None:
        self._send, self._tiles = send, tiles
        self._beat = Beat()
        self._began = self._tile_began = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def stage(self, name: str, step: int, begins: bool) -> None:
        """A stage begins or ends; step counts from 0, -1 is none of denoising."""
        now, told = time.monotonic(), self._beat
        if begins:
            seconds = now - self._began if told.in_step else told.seconds
            steps = told.steps + int(step >= 0)
            told = replace(told, steps=steps, in_step=step >= 0, seconds=seconds)
            self._began = now
        if name == self._tiles and begins:
            told = replace(told, tiles=told.tiles + 1, in_tile=True)
            self._tile_began = now
        elif name == self._tiles:
            slowest = max(told.slowest, now - self._tile_began)
            told = replace(told, in_tile=False, slowest=slowest)
        if told != self._beat:
            self._beat = told
            self._send(told)

    def _run(self) -> None:
        with suppress(OSError):  # the console has gone
            while not self._stop.wait(BEAT_SECONDS):
                self._send(self._beat)


class Pulse:
    """When each rank was last heard, and since when it is in its step or its tile.

    A rank waits for the others inside a step or a tile, and there alone they take about as long
    each time; what it does elsewhere, a load or a text encoder, may take any time. All leave their
    last step together, and rank 0 alone goes on at once: without a tile the others wait for it.
    Time in which the engine did not look, stopped with its ranks, does not count.
    """

    def __init__(self, ranks: int, silence_seconds: float, first_seconds: float) -> None:
        """first_seconds: until the first sign of each."""
        self._least = silence_seconds
        self._first = first_seconds
        self._known: set[int] = set()
        self._looked, self._seconds = time.monotonic(), 0.0
        now = self._now()
        self._heard = [now] * ranks
        self._beats = [Beat()] * ranks
        self._began = [now] * ranks
        self._moved = [now] * ranks

    def hear(self, rank: int, beat: Beat | None) -> None:
        """Anything that a rank says is a sign of life, and what is no beat one of work done."""
        now, before = self._now(), self._beats[rank]
        self._heard[rank] = now
        self._known.add(rank)
        if beat is None:
            self._moved[rank] = now
            return
        if beat.steps != before.steps:
            self._began[rank] = now
        if (beat.tiles, beat.in_tile) != (before.tiles, before.in_tile):
            self._moved[rank] = now
        self._beats[rank] = beat

    def stop(self, rank: int) -> None:
        """It has left its command: it is in no step."""
        self._beats[rank] = replace(self._beats[rank], in_step=False, in_tile=False)

    def trouble(self, working: list[int]) -> tuple[int, str] | None:
        """The rank of these that hangs, and how that was seen."""
        now = self._now()
        silent = {rank: now - self._heard[rank] for rank in working}
        for rank, seconds in silent.items():
            if seconds > self._limit(rank):
                return rank, f"rank {rank} hung (silent for {seconds:.0f} s)"
        stepping = [rank for rank in working if self._beats[rank].in_step]
        for rank in stepping if self._beats[0].in_step else ():
            seconds = now - self._began[rank]
            if seconds > self._step_limit(rank):
                slowest = max(working, key=lambda r: (silent[r] // _MISSED, -self._beats[r].steps))
                return slowest, f"rank {slowest} hung (a step has not ended for {seconds:.0f} s)"
        decoding = [rank for rank in working if self._beats[rank].in_tile]
        for rank in decoding:
            seconds = now - self._moved[rank]
            if seconds > self._tile_limit():  # rank 0 waits for the tiles of the others
                held = max(decoding, key=lambda r: (silent[r] // _MISSED, r > 0, -self._moved[r]))
                return held, f"rank {held} hung (no tile has ended for {seconds:.0f} s)"
        return None

    def _now(self) -> float:
        """Seconds that the engine has looked at the ranks."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, _LOOK_SECONDS)
        self._looked = now
        return self._seconds

    def _limit(self, rank: int) -> float:
        if rank not in self._known:
            return max(self._first, self._least)
        return max(self._least, SLOW_STEPS * self._beats[rank].seconds)

    def _step_limit(self, rank: int) -> float:
        return self._limit(rank) if self._beats[rank].seconds else FIRST_STEP_SECONDS

    def _tile_limit(self) -> float:
        """Of all ranks: on a GPU rank 0 alone waits for what it decodes, the others only begin it.

        So it counts from the first of rank 0's that has ended: a clip of 17 frames, all its tiles.
        """
        if not self._beats[0].slowest:
            return max(FIRST_STEP_SECONDS, self._least)
        slowest = max(beat.slowest for beat in self._beats)
        return max(LEAST_TILES * self._least, SLOW_TILES * slowest)
