"""This runtime as a benchmark's subject: the pipeline of a plan, a whole request in each turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from runtime.bench.base import (
    OneProcess,
    Setup,
    Turn,
    folder_of,
    named,
    opener,
    peak_reserved_bytes,
    turn_of,
)
from runtime.bench.profile import profiled, tell
from runtime.clock import DENOISE, END_TO_END, StageClock
from runtime.h3.denoise import Latents, layout_of
from runtime.h3.packing import target_of
from runtime.h3.pipeline import Pipeline
from runtime.h3.step_bytes import step_bytes
from runtime.h3.synthetic import synthetic_sides
from runtime.media.tensors import write_safetensors_atomic
from runtime.messages import Event, Note
from runtime.meter import Ranges
from runtime.parallel.volume import Moved
from runtime.team import ALONE, Team

_ROWS = " packed rows"  # how the pipeline's note on S ends


class PlanSubject(OneProcess):
    """Loads the plan; with text rows no text encoder is needed, and none is loaded."""

    def __init__(self, setup: Setup, team: Team = ALONE) -> None:
        plan = setup.plan
        if setup.text_rows:
            plan = replace(plan, text_encoder="stream")
        if plan.threads:
            torch.set_num_threads(plan.threads)
        self._setup, self.rows, self._turns = setup, 0, 0
        moved: tuple[Moved, ...] = ()
        self._pipeline = Pipeline(plan, lambda part, done, total: None, opener(setup.weights), team)
        self._latents: Latents | None = None
        self._device = self._pipeline.device
        if setup.text_rows:
            self._sides = synthetic_sides(
                setup.request, setup.text_rows, self._pipeline.model.cfg.text_dim
            )
            target = target_of(setup.request)
            packed = [layout_of(side, target) for side in self._sides if side is not None]
            self.rows = packed[0].num_rows
            moved = step_bytes(self._pipeline.model.cfg, plan, packed, target)
        self.facts: Mapping[str, Any] = {
            "resolved": self._pipeline.resolved,
            "load_seconds": self._pipeline.load_seconds,
            "load_gib_per_s": self._pipeline.load_gib_per_s,
            **({"expected_bytes": [asdict(of_rank) for of_rank in moved]} if moved[1:] else {}),
        }

    def turn(self) -> Turn:
        """Samples, and decodes where asked; a request of its own conditioning writes files too.

        In a folder that is kept the latents are written after the time has been taken.
        """
        with self._folder() as out:
            turn = self._turn(self._setup, named(self._device), out)
            if self._setup.out != Path() and self._latents is not None:
                tensors = {"video": self._latents.video, "audio": self._latents.audio}
                write_safetensors_atomic(out / "latents.safetensors", tensors, {})
            return turn

    def short_turn(self) -> Turn:
        """The only step of a shortened request, as `profile` takes it."""
        with self._folder() as out:
            return self._turn(self._short(), named(self._device), out)

    def profile(self) -> Mapping[str, Any]:
        """The only step of a shortened request."""
        with self._folder() as out:
            measured, events = profiled(
                self._device, lambda: self._turn(self._short(), torch.profiler.record_function, out)
            )
        return tell(events, f"{DENOISE}, step 1", measured.steps[0])

    def _short(self) -> Setup:
        request = replace(self._setup.request, steps=1)
        return replace(self._setup, request=request, decode=False, media=False)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Of one turn."""
        self._turns += 1
        with folder_of(self._setup, self._turns) as folder:
            yield folder

    def _turn(self, setup: Setup, ranges: Ranges, out: Path) -> Turn:
        clock = StageClock(self._device, rank=self._pipeline.team.rank, ranges=ranges)
        if self._pipeline.meter is not None:
            self._pipeline.meter.ranges = ranges
        began = time.perf_counter()
        with clock.stage(END_TO_END):
            if setup.text_rows:
                self._given_conditioning(setup, clock)
            else:
                self._whole_request(setup, clock, out)
        heard = clock.times()  # waits for the device
        times = tuple(one for one in heard if one.rank == clock.rank)
        seconds = time.perf_counter() - began
        allocated = self._pipeline.peak_bytes(clock)
        return turn_of(times, seconds, allocated, peak_reserved_bytes(self._device))

    def _given_conditioning(self, setup: Setup, clock: StageClock) -> None:
        latents = self._latents = self._pipeline.denoise(
            setup.request, *self._sides, emit=self._hear, cancelled=_never, clock=clock
        )
        if setup.decode:
            self._pipeline.play(latents, emit=self._hear, cancelled=_never, clock=clock)

    def _whole_request(self, setup: Setup, clock: StageClock, out: Path) -> None:
        self._pipeline.generate(
            setup.request,
            out=out,
            media=setup.media,
            preview=False,
            emit=self._hear,
            cancelled=_never,
            clock=clock,
        )

    def _hear(self, event: Event) -> None:
        if isinstance(event, Note) and event.text.endswith(_ROWS):
            self.rows = int(event.text.removesuffix(_ROWS))


def _never() -> bool:
    return False
