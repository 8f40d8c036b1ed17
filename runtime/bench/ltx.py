"""LTX as a benchmark's subject: a whole request in each turn, or the sampling of one alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.bench.base import (
    OneProcess,
    Turn,
    folder_of,
    named,
    peak_of_process,
    peak_reserved_bytes,
    turn_of,
)
from runtime.bench.ltx_base import (
    LTXSetup,
    device_of,
    opened,
    random_conditioning,
    sizes,
)
from runtime.bench.profile import Event as TraceEvent
from runtime.bench.profile import profiled, tell
from runtime.clock import DENOISE, END_TO_END, StageClock
from runtime.encode_cache import EncodeCache
from runtime.job import Job
from runtime.ltx.denoiser import Denoiser
from runtime.ltx.facts import resolve
from runtime.ltx.pipeline import CACHE_BYTES, Pipeline
from runtime.ltx.recipe import Latents
from runtime.ltx.rendering import write_latents
from runtime.messages import Event
from runtime.meter import Ranges, StepMeter


class Subject(OneProcess, ABC):
    """What both have: turns in folders of their own, timed by one clock."""

    facts: Mapping[str, Any]

    def __init__(self, setup: LTXSetup) -> None:
        self.setup, self.device, self.rows = setup, device_of(setup.plan), sizes(setup)
        self._turns = 0
        if setup.plan.threads:
            torch.set_num_threads(setup.plan.threads)

    def turn(self) -> Turn:
        """All steps of both stages; a whole request also encodes before and renders after them."""
        return self._turn(named(self.device))

    def profile(self) -> Mapping[str, Any]:
        """The first step of each stage, of one more turn: {"stage 1": ..., "stage 2": ...}."""
        measured, events = profiled(self.device, lambda: self._turn(torch.profiler.record_function))
        return told_of_stages(measured, events, [size["steps"] for size in self.rows])

    def _turn(self, ranges: Ranges) -> Turn:
        self._turns += 1
        with folder_of(self.setup, self._turns) as out:
            return timed_turn(self.device, ranges, self._meter(), lambda c: self._run(c, out))

    @abstractmethod
    def _meter(self) -> StepMeter | None: ...

    @abstractmethod
    def _run(self, clock: StageClock, out: Path) -> Callable[[], None]:
        """Does it all; what it returns is done once the time has been taken."""


class RequestSubject(Subject):
    """The plan's pipeline. The prompt is encoded in every turn, unless the setup says known."""

    def __init__(self, setup: LTXSetup) -> None:
        super().__init__(setup)
        self._pipeline = Pipeline(setup.plan, lambda part, done, total: None)
        self.facts = {
            "resolved": self._pipeline.resolved,
            "load_seconds": self._pipeline.load_seconds,
            "load_gib_per_s": self._pipeline.load_gib_per_s,
        }

    def _meter(self) -> StepMeter | None:
        return self._pipeline.denoiser.meter

    def _run(self, clock: StageClock, out: Path) -> Callable[[], None]:
        if not self.setup.known:
            self._pipeline.cache = EncodeCache(CACHE_BYTES)
        self._pipeline.generate(
            self.setup.request,
            out=out,
            media=self.setup.media,
            preview=False,
            emit=_unheard,
            cancelled=_never,
            clock=clock,
        )
        return lambda: None


class SamplingSubject(Subject):
    """The denoiser alone, on random contexts; between the stages latents are doubled by copying."""

    def __init__(self, setup: LTXSetup) -> None:
        super().__init__(setup)
        checkpoint = opened(setup.plan, setup.weights)
        began = time.perf_counter()
        self._denoiser = Denoiser(setup.plan, checkpoint.census.config, self.device)
        report = self._denoiser.load(checkpoint, lambda done, total: None)
        config, seed = self._denoiser.config, setup.request.seed
        self._conditioning = random_conditioning(
            config, setup.text_rows, seed, self._denoiser.dtype
        )
        self.facts = {
            "resolved": {
                **resolve(setup.plan, checkpoint, self.device),
                "video VAE dtype": "not loaded",
                "upsampler": "not loaded: latents are copied to twice the size",
            },
            "load_seconds": time.perf_counter() - began,
            "load_gib_per_s": report.bytes / 2**30 / max(report.seconds, 1e-9),
        }

    def _meter(self) -> StepMeter | None:
        return self._denoiser.meter

    def _turn(self, ranges: Ranges) -> Turn:
        return replace(super()._turn(ranges), stages={})  # copying is no upsampling

    @torch.inference_mode()
    def _run(self, clock: StageClock, out: Path) -> Callable[[], None]:
        request = self.setup.request
        job = Job(id=request.id, emit=_unheard, cancelled=_never, clock=clock)
        latents: Latents = self._denoiser.sample(request, self._conditioning, Copies(), job)

        def keep() -> None:
            if self.setup.out != Path():
                write_latents(latents, {"id": request.id, "fps": request.fps}, out)

        return keep


class Copies:
    """In the place of an upsampler: what the second stage begins from does not change its time."""

    def double(self, latent_BCFhw: Tensor) -> Tensor:
        """[B, C, F, h, w] to [B, C, F, 2h, 2w]."""
        return latent_BCFhw.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)


def timed_turn(
    device: torch.device,
    ranges: Ranges,
    meter: StepMeter | None,
    run: Callable[[StageClock], Callable[[], None]],
) -> Turn:
    """What one run of everything took; what it returns is done after that."""
    clock = StageClock(device, ranges=ranges)
    if meter is not None:
        meter.ranges = ranges
    began = time.perf_counter()
    with clock.stage(END_TO_END):
        after = run(clock)
    times = clock.times()  # waits for the device
    seconds = time.perf_counter() - began
    allocated = clock.peak_bytes() if device.type == "cuda" else peak_of_process()
    after()
    return turn_of(times, seconds, allocated, peak_reserved_bytes(device))


def told_of_stages(
    measured: Turn, events: Sequence[TraceEvent], steps: Sequence[int]
) -> Mapping[str, Any]:
    """Of the first step of each stage where the GPU's time went."""
    found, first = {}, 0
    for stage, count in enumerate(steps, 1):
        name = f"{DENOISE}, step {first + 1}"
        found[f"stage {stage}"] = tell(events, name, measured.steps[first])
        first += count
    return found


def _unheard(event: Event) -> None:
    """Nobody listens."""


def _never() -> bool:
    return False
