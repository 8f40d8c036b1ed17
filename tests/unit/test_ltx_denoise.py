"""One LTX stage over a closed-form velocity: steps, frozen tokens, noise, timing and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXEulerAncestralRFScheduler
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.ltx.denoise import (
    Clean,
    StepResult,
    Streams,
    Times,
    draw,
    nothing_clean,
    sample_stage,
    start_state,
    step_noise,
)
from runtime.ltx.schedule import STAGE1_SIGMAS, STAGE2_SIGMAS
from runtime.nonfinite import NonFinite

SEED = 5
FRAME = 4  # video tokens of one latent frame


def shapes(batch: int = 1) -> Streams:
    return Streams(video=torch.zeros(batch, 3 * FRAME, 6), audio=torch.zeros(batch, 5, 7))


def first_frame_clean(batch: int = 1) -> Clean:
    live = torch.ones(batch, 3 * FRAME, dtype=torch.bool)
    live[:, :FRAME] = False
    tokens = torch.zeros(batch, 3 * FRAME, 6)
    tokens[:, :FRAME] = torch.randn(batch, FRAME, 6, generator=torch.Generator().manual_seed(77))
    return Clean(tokens_BNC=tokens, live_BN=live)


def evaluate(x: Streams, times: Times) -> Streams:
    """A velocity that depends on the state, on every token's own timestep and on sigma."""
    video = torch.sin(3 * x.video) + times.video_BN[..., None] * x.video.roll(1, dims=1)
    audio = torch.cos(2 * x.audio) - times.audio_BA[..., None] * times.sigma_B[:, None, None]
    return Streams(video=video, audio=audio)


def by_diffusers(x: Streams, clean: Clean, *, stage: int) -> Streams:
    """diffusers' image-to-video loop: only live tokens are handed to the scheduler."""
    sigmas = STAGE1_SIGMAS if stage == 1 else STAGE2_SIGMAS
    schedulers = []
    for _ in range(2):
        if stage == 1:
            scheduler = LTXEulerAncestralRFScheduler()
            scheduler.set_timesteps(sigmas=list(sigmas))
        else:
            scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0)
            scheduler.set_timesteps(sigmas=list(sigmas[:-1]))
        schedulers.append(scheduler)
    generator = torch.Generator().manual_seed(SEED + 10_000)
    extra = {"generator": generator} if stage == 1 else {}
    video, audio, live = x.video.clone(), x.audio.clone(), clean.live_BN[0]
    for step in range(len(sigmas) - 1):
        sigma = schedulers[0].sigmas[step : step + 1]
        times = Times(
            video_BN=clean.live_BN.float() * sigma,
            audio_BA=sigma.expand(audio.shape[:2]),
            sigma_B=sigma.expand(len(audio)),
        )
        velocity = evaluate(Streams(video=video, audio=audio), times)
        t = schedulers[0].timesteps[step]
        stepped = schedulers[0].step(velocity.video[:, live], t, video[:, live], **extra)
        audio = schedulers[1].step(velocity.audio, t, audio, **extra).prev_sample
        video = video.clone()
        video[:, live] = stepped.prev_sample
    return Streams(video=video, audio=audio)


@pytest.mark.parametrize("given", [False, True], ids=["text", "first frame"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_stage_has_the_bits_of_diffusers_loop(batch: int, stage: int, given: bool) -> None:
    like = shapes(batch)
    clean = first_frame_clean(batch) if given else nothing_clean(like.video)
    sigmas = STAGE1_SIGMAS if stage == 1 else STAGE2_SIGMAS
    generator = torch.Generator().manual_seed(SEED)
    init = draw(like, torch.Generator().manual_seed(1))
    x = start_state(init, draw(like, generator), clean, sigmas[0])
    ours = sample_stage(
        evaluate,
        x,
        clean,
        sampler="euler_ancestral" if stage == 1 else "euler",
        sigmas=sigmas,
        noise=step_noise(like, clean, SEED) if stage == 1 else None,
    )
    expected = by_diffusers(x, clean, stage=stage)
    assert torch.equal(ours.video, expected.video)
    assert torch.equal(ours.audio, expected.audio)
    assert torch.equal(ours.video[~clean.live_BN], clean.tokens_BNC[~clean.live_BN])


def test_frozen_tokens_enter_every_evaluation_clean_and_with_timestep_0() -> None:
    clean, seen = first_frame_clean(), []

    def watched(x: Streams, times: Times) -> Streams:
        seen.append(float(times.sigma_B))
        assert torch.equal(x.video[:, :FRAME], clean.tokens_BNC[:, :FRAME])
        assert not times.video_BN[:, :FRAME].any()
        assert (times.video_BN[:, FRAME:] == times.sigma_B).all()
        assert (times.audio_BA == times.sigma_B).all()
        return evaluate(x, times)

    x = start_state(shapes(), draw(shapes(), torch.Generator()), clean, 1.0)
    noise = step_noise(shapes(), clean, SEED)
    results: list[StepResult] = []
    sample_stage(
        watched, x, clean, sampler="euler_ancestral", sigmas=STAGE1_SIGMAS, noise=noise,
        on_step=results.append,
    )  # fmt: skip
    assert seen == pytest.approx(STAGE1_SIGMAS[:-1])
    assert [r.step for r in results] == list(range(8))
    for result in results:
        assert torch.equal(result.denoised.video[:, :FRAME], clean.tokens_BNC[:, :FRAME])


def test_noise_is_drawn_video_first_and_the_generator_goes_on() -> None:
    generator = torch.Generator().manual_seed(SEED)
    first, second = draw(shapes(), generator), draw(shapes(), generator)
    flat = torch.Generator().manual_seed(SEED)
    for part in (first.video, first.audio, second.video, second.audio):
        assert torch.equal(part, torch.randn(part.shape, generator=flat))


def test_step_noise_has_its_own_generator_and_draws_for_live_tokens_only() -> None:
    clean = first_frame_clean()
    fresh = step_noise(shapes(), clean, SEED)
    generator = torch.Generator().manual_seed(SEED + 10_000)
    for step in range(2):
        noise = fresh(step)
        assert not noise.video[:, :FRAME].any()
        drawn = torch.randn((1, 2 * FRAME, 6), generator=generator)
        assert torch.equal(noise.video[:, FRAME:], drawn)
        assert torch.equal(noise.audio, torch.randn((1, 5, 7), generator=generator))


def test_a_start_at_full_noise_forgets_the_initial_latents() -> None:
    clean, noise = nothing_clean(shapes().video), draw(shapes(), torch.Generator())
    x = start_state(draw(shapes(), torch.Generator().manual_seed(3)), noise, clean, 1.0)
    assert torch.equal(x.video, noise.video) and torch.equal(x.audio, noise.audio)


def test_the_evaluation_is_what_is_timed_and_on_step_may_cancel() -> None:
    order: list[str] = []

    @contextmanager
    def timed(step: int) -> Iterator[None]:
        order.append(f"in {step}")
        yield
        order.append(f"out {step}")

    def on_step(result: StepResult) -> None:
        order.append(f"step {result.step}")
        if result.step == 1:
            raise Cancelled

    clean = nothing_clean(shapes().video)
    with pytest.raises(Cancelled):
        sample_stage(
            evaluate, draw(shapes(), torch.Generator()), clean, sampler="euler",
            sigmas=STAGE2_SIGMAS, on_step=on_step, timed=timed,
        )  # fmt: skip
    assert order == ["in 0", "out 0", "step 0", "in 1", "out 1", "step 1"]


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_a_non_finite_stream_is_named_with_its_step(stream: str) -> None:
    def broken(x: Streams, times: Times) -> Streams:
        def spoil(name: str, value: Tensor) -> Tensor:
            late = float(times.sigma_B) < 0.9
            return value / 0 if name == stream and late else value

        return Streams(video=spoil("video", x.video), audio=spoil("audio", x.audio))

    clean = nothing_clean(shapes().video)
    with pytest.raises(NonFinite, match=f"denoise step 2 .* the {stream} latent"):
        x = draw(shapes(), torch.Generator().manual_seed(1))
        sample_stage(broken, x, clean, sampler="euler", sigmas=STAGE2_SIGMAS)


def test_what_cannot_be_sampled_is_refused_in_a_sentence() -> None:
    x = draw(shapes(), torch.Generator())
    clean = nothing_clean(x.video)
    with pytest.raises(ValueError, match="sampler must be euler_ancestral or euler, got 'heun'"):
        sample_stage(evaluate, x, clean, sampler="heun", sigmas=STAGE2_SIGMAS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs noise for its steps"):
        sample_stage(evaluate, x, clean, sampler="euler_ancestral", sigmas=STAGE1_SIGMAS)
    with pytest.raises(ValueError, match="every video token is frozen"):
        Clean(tokens_BNC=x.video, live_BN=torch.zeros(1, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match="live must be bool"):
        Clean(tokens_BNC=x.video, live_BN=torch.ones(1, 12))
    live = torch.ones(2, 12, dtype=torch.bool)
    live[0, 0] = False
    video = torch.zeros(2, 12, 6)
    with pytest.raises(ValueError, match="must freeze the same video tokens"):
        step_noise(
            Streams(video=video, audio=torch.zeros(2, 5, 7)),
            Clean(tokens_BNC=video, live_BN=live),
            SEED,
        )
