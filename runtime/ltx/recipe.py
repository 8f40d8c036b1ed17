"""The distilled recipe: a stage at half the size, the latents doubled, a stage at the full size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.ltx.conditioning import Conditioning, clean_tokens
from runtime.ltx.config import LTXConfig
from runtime.ltx.denoise import (
    Evaluate,
    StepResult,
    Streams,
    draw,
    sample_stage,
    start_state,
    step_noise,
)
from runtime.ltx.packing import audio_latent, video_latent, video_tokens
from runtime.ltx.schedule import STAGE1_SIGMAS, STAGE2_SIGMAS, Sampler
from runtime.ltx.sizes import LTXShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the recipe."""

    shape: LTXShape
    sampler: Sampler
    sigmas: tuple[float, ...]

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """What is decoded: video [1, C, F, h, w] normalised, audio [1, 8, A, 16]; fp32."""

    video: Tensor
    audio: Tensor


class Doubles(Protocol):
    """The upsampler's seam: [1, C, F, h, w] normalised to [1, C, F, 2h, 2w]."""

    def double(self, latent_BCFhw: Tensor) -> Tensor: ...


def two_stages(shape: LTXShape) -> tuple[Stage, Stage]:
    """Of a clip whose sides are multiples of 64; ValueError otherwise."""
    return (
        Stage(shape=shape.half, sampler="euler_ancestral", sigmas=STAGE1_SIGMAS),
        Stage(shape=shape, sampler="euler", sigmas=STAGE2_SIGMAS),
    )


def generate_latents(
    stages: tuple[Stage, Stage],
    velocity: Callable[[Stage], Evaluate],
    conditioning: Conditioning,
    upsampler: Doubles,
    config: LTXConfig,
    *,
    seed: int,
    device: torch.device,
    on_step: Callable[[StepResult], None] = lambda result: None,
    timed: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
    doubling: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Latents:
    """Both stages of one clip.

    `velocity` is asked once per stage; `doubling()` encloses the upsampler. One generator of `seed`
    draws the initial noise of the stages in turn; steps count through both.
    """
    generator = torch.Generator().manual_seed(seed)

    def run(number: int, init: Streams | None, first_step: int) -> Streams:
        """One stage from noise over `init`; None: over nothing, for it starts at sigma 1."""
        stage, latent = stages[number], stages[number].shape.latent
        frames = conditioning.first_frames
        clean = clean_tokens(frames[number] if frames else None, latent, config.in_channels)
        sound = torch.empty(1, latent.audio, config.audio_in_channels)
        noise = draw(Streams(video=clean.tokens_BNC, audio=sound), generator)
        fresh = step_noise(noise, clean, seed) if stage.sampler == "euler_ancestral" else None
        noise, clean = noise.to(device), clean.to(device)
        return sample_stage(
            velocity(stage),
            start_state(noise if init is None else init, noise, clean, stage.sigmas[0]),
            clean,
            sampler=stage.sampler,
            sigmas=stage.sigmas,
            noise=fresh,
            first_step=first_step,
            on_step=on_step,
            timed=timed,
        )

    half, full = (stage.shape.latent for stage in stages)
    small = run(0, None, 0)
    with doubling():
        doubled = upsampler.double(video_latent(small.video, half))
    init = Streams(video=video_tokens(doubled).to(device), audio=small.audio)
    end = run(1, init, stages[0].steps)
    return Latents(video=video_latent(end.video, full), audio=audio_latent(end.audio))
