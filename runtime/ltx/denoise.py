"""Sampling one stage of a request: two token streams on one list of sigmas (ltx25 contract 4).

The state is float32 in token layout: video [B,N,C] in (f,h,w) order, audio [B,A,C] with the mel
bins inside the channels. Frozen video tokens (a given first frame) keep their clean value: they
enter every evaluation with timestep 0, and take no step and no noise, as in diffusers'
image-to-video pipeline; partial strengths have no reference and do not exist here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ltx.model import Contexts, LTXModel, V2ASource
from runtime.ltx.packing import Seconds, keyframe_mask, rope_tables
from runtime.ltx.schedule import Sampler, ancestral_step, euler_step, sigma_list
from runtime.ltx.sizes import LatentShape
from runtime.nonfinite import require_finite

STEP_NOISE_OFFSET = 10_000  # the ancestral noise has a generator of its own: seed + this


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """One tensor per stream: video [B,N,C], audio [B,A,C] (latents, velocities or noise)."""

    video: Tensor
    audio: Tensor

    def to(self, device: torch.device) -> Streams:
        return Streams(video=self.video.to(device), audio=self.audio.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What one evaluation is told of noise: fp32 in [0, 1], timesteps per token, sigma per item."""

    video_BN: Tensor  # 0 where the token is frozen
    audio_BA: Tensor
    sigma_B: Tensor  # unmasked, for the prompt and gate heads of both streams


# (state in float32, times) -> velocity, noise minus data, in any dtype
Evaluate = Callable[[Streams, Times], Streams]
StepNoise = Callable[[int], Streams]  # fresh unit noise of one step, in the state's shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """Video tokens that are given: their values, and which tokens are sampled.

    tokens_BNC fp32, zeros where live; live_BN bool, at least one true. ValueError otherwise.
    """

    tokens_BNC: Tensor
    live_BN: Tensor

    def __post_init__(self) -> None:
        if self.live_BN.dtype != torch.bool or self.live_BN.shape != self.tokens_BNC.shape[:2]:
            raise ValueError(
                f"live must be bool {tuple(self.tokens_BNC.shape[:2])}, one per token, got "
                f"{self.live_BN.dtype} {tuple(self.live_BN.shape)}"
            )
        if not bool(self.live_BN.any()):
            raise ValueError("every video token is frozen, so nothing is left to sample")

    def to(self, device: torch.device) -> Clean:
        return Clean(tokens_BNC=self.tokens_BNC.to(device), live_BN=self.live_BN.to(device))

    def over(self, video_BNC: Tensor) -> Tensor:
        """The tokens with the frozen ones in their places."""
        return torch.where(self.live_BN[..., None], video_BNC, self.tokens_BNC)


def nothing_clean(video_BNC: Tensor) -> Clean:
    """Every token of a state of this shape is sampled."""
    live = torch.ones(video_BNC.shape[:2], dtype=torch.bool, device=video_BNC.device)
    return Clean(tokens_BNC=torch.zeros_like(video_BNC), live_BN=live)


class Velocity:
    """The model under one prompt at one size: everything constant over the steps of a stage."""

    def __init__(
        self,
        model: LTXModel,
        contexts: Contexts,
        shape: LatentShape,
        fps: float,
        *,
        seconds: Seconds = "divide",
        v2a_source: V2ASource = "pre_a2v",
        rope_dtype: torch.dtype = torch.float32,
    ) -> None:
        """seconds, rope_dtype: as rope_tables takes them; v2a_source: as LTXModel.forward."""
        self.model, self.v2a_source = model, v2a_source
        self.contexts = Contexts(
            video_BLD=contexts.video_BLD.to(model.device),
            audio_BLD=contexts.audio_BLD.to(model.device),
        )
        self.rope = rope_tables(
            model.config, shape, fps, seconds=seconds, device=model.device, dtype=rope_dtype
        )
        self.keyframe_mask = keyframe_mask(shape, model.device)

    def __call__(self, x: Streams, times: Times) -> Streams:
        video, audio = self.model(
            x.video,
            x.audio,
            self.contexts.video_BLD,
            self.contexts.audio_BLD,
            video_timestep_BN=times.video_BN,
            audio_timestep_BA=times.audio_BA,
            video_sigma_B=times.sigma_B,
            audio_sigma_B=times.sigma_B,
            rope=self.rope,
            keyframe_mask=self.keyframe_mask,
            v2a_source=self.v2a_source,
        )
        return Streams(video=video, audio=audio)


def draw(like: Streams, generator: torch.Generator) -> Streams:
    """Unit noise in float32 on the CPU in the shapes of `like`: video first, then audio."""
    video = torch.randn(like.video.shape, generator=generator)
    return Streams(video=video, audio=torch.randn(like.audio.shape, generator=generator))


def step_noise(like: Streams, clean: Clean, seed: int) -> StepNoise:
    """The ancestral noise of a seed, to be called once per step in order (CPU, float32).

    Only live tokens draw, so a given frame changes the noise of all that follows it in the stream,
    as it does in diffusers; all items of a batch freeze the same tokens. ValueError otherwise.
    """
    live_N = clean.live_BN[0].cpu()
    if not torch.equal(clean.live_BN.cpu(), live_N.expand(clean.live_BN.shape)):
        raise ValueError("all items of a batch must freeze the same video tokens")
    generator = torch.Generator().manual_seed(seed + STEP_NOISE_OFFSET)

    batch, _, channels = like.video.shape
    drawn = Streams(video=torch.empty(batch, int(live_N.sum()), channels), audio=like.audio)

    def fresh(step: int) -> Streams:
        del step
        noise = draw(drawn, generator)
        video = torch.zeros(like.video.shape)
        video[:, live_N] = noise.video
        return Streams(video=video, audio=noise.audio)

    return fresh


def start_state(init: Streams, noise: Streams, clean: Clean, noise_scale: float) -> Streams:
    """lerp(init, noise, noise_scale), then the frozen tokens; init is ignored at noise_scale 1."""
    return Streams(
        video=clean.over(torch.lerp(init.video, noise.video, noise_scale)),
        audio=torch.lerp(init.audio, noise.audio, noise_scale),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the sampler had at one step: state before it, velocity, and prediction x0."""

    step: int  # of all stages
    sigma: float
    x: Streams
    velocity: Streams
    denoised: Streams


def sample_stage(
    evaluate: Evaluate,
    x: Streams,
    clean: Clean,
    *,
    sampler: Sampler,
    sigmas: Sequence[float],
    noise: StepNoise | None = None,
    first_step: int = 0,
    on_step: Callable[[StepResult], None] = lambda result: None,
    timed: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> Streams:
    """Run one stage from `x` at sigmas[0] (start_state); returns the clean streams, fp32.

    `noise` is asked for once per step except the last with "euler_ancestral", never with "euler".
    `on_step` may raise to cancel; `timed(step)` encloses the evaluation. Steps count from
    `first_step` for both, and for NonFinite, which names step and stream.
    """
    if sampler not in ("euler_ancestral", "euler"):
        raise ValueError(f"sampler must be euler_ancestral or euler, got {sampler!r}")
    if sampler == "euler_ancestral" and noise is None:
        raise ValueError("the sampler euler_ancestral needs noise for its steps, got none")
    schedule = sigma_list(sigmas)
    for step, (sigma, sigma_next) in enumerate(itertools.pairwise(schedule), first_step):
        with timed(step):
            velocity = evaluate(x, times_of(x, clean, sigma))
        result = predict(step, x, velocity, clean, sigma)
        on_step(result)
        fresh = None
        if sampler == "euler_ancestral" and noise is not None and sigma_next > 0:
            fresh = noise(step).to(x.video.device)
        x = advance(result, fresh, clean, sampler, sigma, sigma_next)
    return x


def times_of(x: Streams, clean: Clean, sigma: Tensor) -> Times:
    """What the evaluation of this state at 0-dim sigma is told."""
    sigma_B = sigma.to(x.video.device).expand(len(x.video))
    return Times(
        video_BN=clean.live_BN * sigma_B[:, None],
        audio_BA=sigma_B[:, None].expand(x.audio.shape[:2]),
        sigma_B=sigma_B,
    )


def predict(step: int, x: Streams, velocity: Streams, clean: Clean, sigma: Tensor) -> StepResult:
    """x - t*velocity with every token's own t; a frozen token predicts its clean value.

    NonFinite names step and stream.
    """
    times = times_of(x, clean, sigma)
    v = Streams(video=velocity.video.float(), audio=velocity.audio.float())
    denoised = Streams(
        video=clean.over(x.video - times.video_BN[..., None] * v.video),
        audio=x.audio - times.audio_BA[..., None] * v.audio,
    )
    _require_finite(denoised, step)
    return StepResult(step=step, sigma=float(sigma), x=x, velocity=v, denoised=denoised)


def _require_finite(denoised: Streams, step: int) -> None:
    """The step's one wait for the GPU; the streams apart only once something is wrong."""
    if not bool(torch.isfinite(denoised.video).all() & torch.isfinite(denoised.audio).all()):
        stage = f"denoise step {step + 1}"
        require_finite(denoised.video, stage=stage, tensor="the video latent")
        require_finite(denoised.audio, stage=stage, tensor="the audio latent")


def advance(
    at: StepResult,
    noise: Streams | None,
    clean: Clean,
    sampler: Sampler,
    sigma: Tensor,
    sigma_next: Tensor,
) -> Streams:
    """The state at sigma_next. noise: of the ancestral sampler, None for its step to 0."""
    if sampler == "euler":
        return Streams(
            video=clean.over(euler_step(at.x.video, at.velocity.video, sigma, sigma_next)),
            audio=euler_step(at.x.audio, at.velocity.audio, sigma, sigma_next),
        )
    video = None if noise is None else noise.video
    audio = None if noise is None else noise.audio
    return Streams(
        video=clean.over(ancestral_step(at.x.video, at.denoised.video, video, sigma, sigma_next)),
        audio=ancestral_step(at.x.audio, at.denoised.audio, audio, sigma, sigma_next),
    )
