"""Replay of LTX schedules and trajectories: sigmas, single steps, whole stages of every program.

Names of a trajectory are PROGRAM.step.K.{x,x0,velocity,noise}.STREAM and PROGRAM.final.STREAM
(goldens_ltx/README.md). The stored step noise is ComfyUI's as well: it was injected there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from runtime.ltx.denoise import (
    Clean,
    StepNoise,
    StepResult,
    Streams,
    Velocity,
    advance,
    draw,
    predict,
    sample_stage,
    start_state,
    step_noise,
    times_of,
)
from runtime.ltx.model import Contexts, V2ASource
from runtime.ltx.schedule import (
    STAGE1_SIGMAS,
    STAGE2_SIGMAS,
    Sampler,
    ancestral,
    ancestral_step,
    sigma_list,
)
from runtime.parity.golden import Golden
from runtime.parity.ltx_apart import apart_by
from runtime.parity.ltx_files import PROGRAMS, Denoisers, arithmetic_of, fps_of, shape_of
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup

STREAMS = ("video", "audio")
SAMPLERS = ("euler_ancestral", "euler")
REFERENCE = "model_pre_a2v"  # the program that the step noise is stored with
LISTS = {"stage1": STAGE1_SIGMAS, "stage2": STAGE2_SIGMAS}
TIMESTEPS = 1000  # what diffusers' schedulers call a sigma of 1


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Both kinds: `ltx_schedule` needs no weights."""
    if golden.kind == "ltx_schedule":
        return list(_schedule(golden))
    return list(_Stage(golden, checkpoints, setup).comparisons())


# ---- schedules


def _schedule(golden: Golden) -> Iterator[Comparison]:
    for name in sorted(golden.names):
        stage, _, what = name.partition(".")
        found = None
        if stage in LISTS:
            found = _list_values(stage, what, golden.tensor(name))
        elif name.startswith("unit.ancestral."):
            found = _unit_step(golden, int(name.rsplit(".", 1)[1]))
        if found is not None:
            kind = "coefficients" if what.startswith("ancestral") else "schedule"
            yield compare(name, found, golden.tensor(name), run="free", stage=kind)


def _list_values(stage: str, what: str, stored: Tensor) -> Tensor | None:
    """Our values of one stored list; the timesteps of some schedulers end before the last sigma."""
    sigmas = sigma_list(LISTS[stage])
    if not what:
        return torch.tensor(LISTS[stage], dtype=torch.float64)
    if what.endswith("_sigmas"):
        return sigmas
    if what.endswith("_timesteps"):
        return (sigmas * TIMESTEPS)[: len(stored)]
    if what == "ancestral_coefficients_float64":
        exact = torch.tensor(LISTS[stage], dtype=torch.float64)
        pairs = itertools.pairwise(exact[:-1])
        steps = [ancestral(sigma, sigma_next) for sigma, sigma_next in pairs]
        return torch.stack([torch.stack([s.down, s.ratio, s.rescale, s.renoise]) for s in steps])
    return None


def _unit_step(golden: Golden, step: int) -> Tensor:
    sigmas = sigma_list(STAGE1_SIGMAS)
    x, velocity = golden.tensor("unit.x"), golden.tensor("unit.velocity")
    noise = golden.tensor(f"unit.noise.{step}")
    last = step == len(sigmas) - 2
    denoised = x - sigmas[step] * velocity
    return ancestral_step(x, denoised, None if last else noise, sigmas[step], sigmas[step + 1])


# ---- trajectories


class _Stage:
    """One golden with its denoisers, inputs and noise."""

    def __init__(self, golden: Golden, checkpoints: Path, setup: Setup) -> None:
        self.golden, self.setup = golden, setup
        params = golden.params
        for name in ("eta", "s_noise"):
            if params.get(name, 1.0) != 1.0:
                raise Unsupported(f"{name} {params[name]}: only 1 is implemented")
        sampler = params.get("comfy_sampler")
        if sampler not in SAMPLERS:
            raise Unsupported(f"sampler {sampler!r}; known: {', '.join(SAMPLERS)}")
        self.sampler = cast(Sampler, sampler)
        self.sigmas: list[float] = params["sigmas"]
        self.denoisers = Denoisers(golden, checkpoints, setup)
        mask_BN = golden.tensor("in.denoise_mask")
        live_BN = mask_BN > 0
        if not bool((live_BN == mask_BN).all()):
            raise Unsupported("denoise_mask with other values than 0 and 1: no partial strengths")
        self.clean = Clean(tokens_BNC=golden.tensor("in.clean.video"), live_BN=live_BN)
        self.like = self._streams("in.noise")

    def comparisons(self) -> Iterator[Comparison]:
        yield from self._noise()
        stored = {name.split(".")[0] for name in self.golden.names} - {"in"}
        unknown = sorted(stored - set(PROGRAMS))
        if unknown:
            raise Unsupported(f"program {unknown[0]!r}; known: {', '.join(PROGRAMS)}")
        for program in sorted(stored):
            yield from self._free(program)
        if self.setup.staged:
            for program in sorted(stored):
                yield from self._staged(program)
        for program in sorted(stored):
            if PROGRAMS[program].v2a_source == "post_a2v":
                yield from self._told_apart(program)

    # ---- what is drawn

    def _noise(self) -> Iterator[Comparison]:
        """Our own draws against the stored ones, which the trajectories then take.

        Staged where anything is: wrong noise is to be named before the steps that it spoils.
        """
        params = self.golden.params
        run = "staged" if self.setup.staged else "free"
        generator = torch.Generator().manual_seed(params["noise_seed"])
        yield from self._compare("in.noise", draw(self.like, generator), run, "noise")
        if self.sampler == "euler_ancestral":
            seed = params["step_noise_seed"] - 10_000
            fresh = step_noise(self.like, self.clean, seed)
            for step in range(len(self.sigmas) - 2):
                name = f"{REFERENCE}.step.{step}.noise"
                yield from self._compare(name, fresh(step), run, "noise")
        name = f"{REFERENCE}.sigmas"
        if name in self.golden:
            ours = sigma_list(self.sigmas)
            yield compare(name, ours, self.golden.tensor(name), run="free", stage="schedule")

    def _step_noise(self) -> StepNoise | None:
        if self.sampler == "euler":
            return None
        return lambda step: self._streams(f"{REFERENCE}.step.{step}.noise")

    # ---- free and staged

    def _velocity(self, program: str, v2a_source: V2ASource | None = None) -> Velocity:
        of = PROGRAMS[program]
        arithmetic = arithmetic_of(self.golden, "")
        return Velocity(
            self.denoisers.get(arithmetic, of.form),
            Contexts(
                video_BLD=self.golden.tensor("in.video_context"),
                audio_BLD=self.golden.tensor("in.audio_context"),
            ),
            shape_of(self.golden),
            fps_of(self.golden),
            seconds=of.seconds,
            v2a_source=v2a_source or of.v2a_source,
            rope_dtype=of.rope_dtype(arithmetic.dtype),
        )

    def _run(
        self, program: str, v2a_source: V2ASource | None = None
    ) -> tuple[list[StepResult], Streams]:
        device, steps = self.setup.device, list[StepResult]()
        clean = self.clean.to(device)
        init, noise = self._streams("in.init").to(device), self.like.to(device)

        def on_step(result: StepResult) -> None:
            steps.append(result)
            self.setup.on_step("free", result.step + 1, len(self.sigmas) - 1)

        end = sample_stage(
            self._velocity(program, v2a_source),
            start_state(init, noise, clean, self.sigmas[0]),
            clean,
            sampler=self.sampler,
            sigmas=self.sigmas,
            noise=self._step_noise(),
            on_step=on_step,
        )
        return steps, end

    def _free(self, program: str) -> Iterator[Comparison]:
        steps, end = self._run(program)
        for at in steps:
            lead, stage = f"{program}.step.{at.step}", f"step {at.step}"
            # ComfyUI's own state is noisy where the frame is frozen; the model never sees it
            live_only = program != REFERENCE
            yield from self._compare(f"{lead}.x", at.x, "free", stage, live_only=live_only)
            yield from self._compare(f"{lead}.velocity", at.velocity, "free", stage)
            yield from self._compare(f"{lead}.x0", at.denoised, "free", stage)
        yield from self._compare(f"{program}.final", end, "free", "final")

    def _staged(self, program: str) -> Iterator[Comparison]:
        """Every step alone, from its stored state: evaluation, prediction and update."""
        velocity, noise, sigmas = (
            self._velocity(program),
            self._step_noise(),
            sigma_list(self.sigmas),
        )
        last = len(sigmas) - 2
        for step in range(last + 1):
            lead, stage = f"{program}.step.{step}", f"step {step}"
            stored = self._streams(f"{lead}.x")
            x = Streams(video=self.clean.over(stored.video), audio=stored.audio)
            v = velocity(x, times_of(x, self.clean, sigmas[step]))
            at = predict(step, x, v, self.clean, sigmas[step])
            yield from self._compare(f"{lead}.velocity", at.velocity, "staged", stage)
            yield from self._compare(f"{lead}.x0", at.denoised, "staged", stage)
            fresh = None if noise is None or step == last else noise(step)
            after = advance(at, fresh, self.clean, self.sampler, sigmas[step], sigmas[step + 1])
            name = f"{program}.final" if step == last else f"{program}.step.{step + 1}.x"
            live_only = program != REFERENCE and step != last
            yield from self._compare(name, after, "staged", f"{stage} update", live_only=live_only)

    def _told_apart(self, program: str) -> Iterator[Comparison]:
        """A trajectory of one form must not fit the other one."""
        _, other = self._run(program, "pre_a2v")
        for stream in STREAMS:
            name = f"{program}.final.{stream}"
            yield apart_by(name, getattr(other, stream), self.golden.tensor(name))

    # ---- names

    def _streams(self, name: str) -> Streams:
        return Streams(
            video=self.golden.tensor(f"{name}.video"), audio=self.golden.tensor(f"{name}.audio")
        )

    def _compare(
        self, name: str, got: Streams, run: str, stage: str, *, live_only: bool = False
    ) -> Iterator[Comparison]:
        for stream in STREAMS:
            stored = f"{name}.{stream}"
            if stored not in self.golden:
                continue
            ours, want = getattr(got, stream).cpu(), self.golden.tensor(stored)
            if live_only and stream == "video":
                ours, want = ours[self.clean.live_BN], want[self.clean.live_BN]
            yield compare(stored, ours, want, run=run, stage=stage)
