"""The sampling loop around a velocity field: guidance, the audio carry, stops (contract 2, 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.h3.conditioning import ReferenceBlock
from runtime.h3.denoise import Latents, Shifts, Side, StepResult, Tap, draw_noise, sample
from runtime.h3.packing import TargetShape
from runtime.h3.schedule import audio_sigma, sigmas_for
from runtime.nonfinite import NonFinite
from tests.denoiser_parts import CPU, TARGET, conditioning, denoiser, normal, side

NOISE = draw_noise(TARGET, 11)
SIGMAS = sigmas_for("simple", 4, 12.0)
Prediction = Callable[[Tensor, int], Tensor]


class Toy(Side):
    """A side with a given prediction in place of the model."""

    def __init__(
        self, predict: Prediction, calls: list[str] | None = None, name: str = "toy",
        shifts: Shifts | None = None,
    ) -> None:  # fmt: skip
        self.device, self.shifts = CPU, shifts or Shifts()
        self.predict, self.calls, self.name, self.step = predict, calls, name, 0

    def build_tables(self, sigmas: Tensor, others: Sequence[Side]) -> None:
        """Nothing is evaluated at these times."""

    def denoised(self, x: Tensor, sigma: Tensor, like: Latents, tap: Tap | None = None) -> Tensor:
        if self.calls is not None:
            self.calls.append(self.name)
        self.step += 1
        return self.predict(x, self.step)


def run(
    positive: Side,
    negative: Side | None = None,
    *,
    cfg: float = 1.0,
    sampler: str = "euler",
    sigmas: Tensor = SIGMAS,
    start: Latents | None = None,
    on_step: Callable[[StepResult], None] = lambda step: None,
) -> Latents:
    return sample(
        positive,
        negative,
        cfg=cfg,
        sampler=sampler,
        sigmas=sigmas,
        noise=NOISE,
        start=start,
        on_step=on_step,
    )


# ---- guidance


def test_guidance_moves_from_the_negative_through_the_positive() -> None:
    seen: list[StepResult] = []
    positive, negative = Toy(lambda x, step: 0.5 * x), Toy(lambda x, step: 0.2 * x - 1)
    run(positive, negative, cfg=3.0, on_step=seen.append)
    for step in seen:
        x = step.x.packed()
        want = (0.2 * x - 1) + (0.5 * x - (0.2 * x - 1)) * 3.0
        assert torch.equal(step.denoised.packed(), want)


def test_the_positive_side_is_evaluated_before_the_negative_at_every_step() -> None:
    calls: list[str] = []
    positive = Toy(lambda x, step: x, calls, "positive")
    run(positive, Toy(lambda x, step: x, calls, "negative"), cfg=4.0)
    assert calls == ["positive", "negative"] * 4


def test_without_a_negative_the_prediction_is_the_positive_one() -> None:
    seen: list[StepResult] = []
    run(Toy(lambda x, step: 0.3 * x), on_step=seen.append)
    assert all(torch.equal(s.denoised.packed(), 0.3 * s.x.packed()) for s in seen)


def test_real_sides_are_guided_by_their_own_text() -> None:
    model = denoiser()
    positive, negative = side(model), side(model, conditioning((1, 1)))
    taps: dict[str, Tensor] = {}
    sample(
        positive,
        negative,
        cfg=2.5,
        sampler="euler",
        sigmas=SIGMAS,
        noise=NOISE,
        start=None,
        on_step=lambda step: None,
        tap=lambda name, value: taps.__setitem__(name, value.clone()),
    )
    x = NOISE.packed()
    first = Latents(
        video=taps["step_00/pos_denoised_video"], audio=taps["step_00/pos_denoised_audio"]
    )
    assert torch.equal(first.packed(), positive.denoised(x, SIGMAS[0], NOISE))
    assert not torch.equal(taps["step_00/neg_denoised_video"], first.video)
    assert {name for name in taps if "step_03" in name} >= {
        "step_03/net_pos/v_video",
        "step_03/net_neg/v_audio",
        "step_03/neg_denoised_audio",
    }


# ---- the audio carry


def velocities(shifts: Shifts, sigma: Tensor) -> tuple[Latents, dict[str, Tensor]]:
    taps: dict[str, Tensor] = {}
    built = side(denoiser(dtype="bf16"), shifts=shifts)
    x = Latents(video=NOISE.video.bfloat16(), audio=NOISE.audio.bfloat16())
    with torch.inference_mode():
        return built.velocity(x, sigma, taps.__setitem__), taps


def test_equal_shifts_leave_the_audio_alone() -> None:
    got, taps = velocities(Shifts(video=5.0, audio=5.0), torch.tensor(0.6))
    assert torch.equal(taps["audio_in"], NOISE.audio.bfloat16())
    assert torch.equal(got.audio, taps["v_audio"])
    assert torch.equal(got.video, taps["v_video"])


@pytest.mark.parametrize("sigma", [0.992, 0.5, 0.05])
def test_the_carry_is_rounded_to_the_models_dtype(sigma: float) -> None:
    """Contract 2.5, with every bf16 rounding written out."""
    sigma_v = torch.tensor(sigma)
    got, taps = velocities(Shifts(), sigma_v)
    sigma_a = audio_sigma(sigma_v * 1000 / 1000, 12.0, 3.0)

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    carried = rounded(NOISE.audio) * rounded(sigma_a / sigma_v)
    assert torch.equal(taps["audio_in"].float(), rounded(carried))
    own = rounded(-3.0 * taps["audio_in"].float())
    moved = rounded(rounded(1 + 3.0 * sigma_a) * taps["v_audio"].float())
    assert torch.equal(got.audio.float(), rounded(own + moved))
    assert torch.equal(got.video, taps["v_video"])


def test_sigma_goes_through_a_thousand_and_back_as_a_timestep() -> None:
    """Trap 2: the detour moves one sigma of the simple schedule's 20 by an ulp."""
    sigmas = sigmas_for("simple", 20, 12.0)
    (moved,) = (s for s in sigmas if not torch.equal(s * 1000 / 1000, s))
    after = moved * 1000 / 1000
    assert torch.equal(after * 1000 / 1000, after)
    built = side(denoiser("full_bf16"))
    with torch.inference_mode():
        assert torch.equal(
            built.velocity(NOISE, moved).packed(), built.velocity(NOISE, after).packed()
        )


def test_sigma_zero_is_evaluated_at_the_smallest_sigma() -> None:
    at_zero, _ = velocities(Shifts(), torch.tensor(0.0))
    smallest, _ = velocities(Shifts(), torch.tensor(1e-6))
    assert torch.isfinite(at_zero.audio).all()
    assert torch.equal(at_zero.audio, smallest.audio)


def test_the_model_sees_x_in_its_dtype_and_the_sampler_keeps_float32() -> None:
    built = side(denoiser(dtype="bf16"))
    x = NOISE.packed()
    with torch.inference_mode():
        got = built.denoised(x, SIGMAS[1], NOISE)
        rounded = Latents(video=NOISE.video.bfloat16(), audio=NOISE.audio.bfloat16())
        velocity = built.velocity(rounded, SIGMAS[1])
    assert velocity.video.dtype == torch.bfloat16 and got.dtype == torch.float32
    assert torch.equal(got, x - velocity.packed().float() * SIGMAS[1])


def test_the_result_has_its_audio_in_its_own_scale() -> None:
    target = Latents(video=normal(1, 24, 2, 4, 6), audio=normal(1, 32, 2, 8))
    end = run(Toy(lambda x, step: target.packed()))
    torch.testing.assert_close(end.video, target.video, rtol=0, atol=1e-6)
    torch.testing.assert_close(end.audio, target.audio / 4, rtol=0, atol=1e-6)
    assert end.video.shape == NOISE.video.shape and end.audio.shape == NOISE.audio.shape


# ---- start


def first_x(start: Latents | None, sigmas: Tensor, shifts: Shifts | None = None) -> Latents:
    seen: list[StepResult] = []
    run(Toy(lambda x, step: x, shifts=shifts), sigmas=sigmas, start=start, on_step=seen.append)
    return seen[0].x


def test_from_nothing_the_first_x_is_the_noise_itself() -> None:
    x = first_x(None, SIGMAS)
    assert torch.equal(x.video, NOISE.video) and torch.equal(x.audio, NOISE.audio)


def test_a_start_is_mixed_in_and_its_audio_is_scaled_by_the_ratio_of_the_shifts() -> None:
    start = Latents(video=normal(1, 24, 2, 4, 6), audio=normal(1, 32, 2, 8))
    sigmas = sigmas_for("simple", 4, 12.0, denoise=0.5)
    x = first_x(start, sigmas, Shifts(video=7.0, audio=2.0))
    s = sigmas[0]
    assert s < 1
    assert torch.equal(x.video, s * NOISE.video + (1 - s) * start.video)
    assert torch.equal(x.audio, s * NOISE.audio + (1 - s) * (start.audio * 3.5))


def test_a_silent_start_stays_silent() -> None:
    start = Latents(video=normal(1, 24, 2, 4, 6), audio=torch.zeros(1, 32, 2, 8))
    sigmas = sigmas_for("simple", 4, 12.0, denoise=0.5)
    assert torch.equal(first_x(start, sigmas).audio, sigmas[0] * NOISE.audio)


# ---- stops


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("place", "stream"), [(0, "video"), (-1, "audio")])
def test_a_broken_number_stops_the_run_naming_step_and_stream(
    value: float, place: int, stream: str
) -> None:
    def predict(x: Tensor, step: int) -> Tensor:
        out = x.clone()
        if step == 3:
            out[..., place] = value
        return out

    seen: list[StepResult] = []
    said = f"denoise step 3 produced non-finite values in the {stream} latent"
    with pytest.raises(NonFinite, match=said) as error:
        run(Toy(predict), on_step=seen.append)
    assert error.value.stage == "denoise step 3"
    assert [step.step for step in seen] == [0, 1]


def test_a_cancel_after_a_step_ends_the_run_there() -> None:
    calls: list[str] = []

    def stop(step: StepResult) -> None:
        if step.step == 1:
            raise Cancelled

    with pytest.raises(Cancelled):
        run(Toy(lambda x, step: x, calls), on_step=stop)
    assert len(calls) == 2


def test_a_cancel_before_a_step_saves_its_evaluation() -> None:
    calls: list[str] = []
    steps: list[int] = []

    @contextmanager
    def timed(step: int) -> Iterator[None]:
        if step == 2:
            raise Cancelled
        steps.append(step)
        yield

    with pytest.raises(Cancelled):
        sample(
            Toy(lambda x, step: x, calls),
            None,
            cfg=1.0,
            sampler="res_multistep",
            sigmas=SIGMAS,
            noise=NOISE,
            start=None,
            on_step=lambda step: None,
            timed=timed,
        )
    assert steps == [0, 1] and len(calls) == 2


def test_every_step_is_reported_with_its_sigma_and_state() -> None:
    seen: list[StepResult] = []
    run(Toy(lambda x, step: 0.5 * x), on_step=seen.append)
    assert [step.step for step in seen] == [0, 1, 2, 3]
    assert [step.sigma for step in seen] == SIGMAS[:-1].tolist()


# ---- one side


def test_a_side_is_the_same_at_every_call() -> None:
    """The blocks work in place: nothing that a side keeps may be written to."""
    references = (ReferenceBlock(kind="image", latent=normal(1, 24, 1, 4, 6)),)
    built = side(denoiser(), conditioning((1, 0, 1), references))
    x = NOISE.packed()
    with torch.inference_mode():
        first = built.denoised(x, SIGMAS[1], NOISE)
        second = built.denoised(x, SIGMAS[1], NOISE)
    assert torch.equal(first, second)
    assert torch.equal(x, NOISE.packed())


def test_packs_are_video_then_audio_and_come_back() -> None:
    packed = NOISE.packed()
    assert packed.shape == (1, 1, 24 * 2 * 4 * 6 + 64 * 8)
    assert torch.equal(packed[0, 0, : NOISE.video.numel()], NOISE.video.flatten())
    back = NOISE.unpack(packed)
    assert torch.equal(back.video, NOISE.video) and torch.equal(back.audio, NOISE.audio)


def test_odd_sizes_run_and_keep_their_shape() -> None:
    odd = TargetShape(latent_t=2, latent_h=3, latent_w=5, audio_t=8)
    noise = draw_noise(odd, 1)
    with torch.inference_mode():
        velocity = side(denoiser(), target=odd).velocity(noise, torch.tensor(0.5))
    assert velocity.video.shape == (1, 24, 2, 3, 5) and velocity.audio.shape == (1, 32, 2, 8)
