"""diffusers' H3 transformer as a second oracle: same weights, same rows, no shared code.

Measured: fp32 1.4e-7 to 3.1e-7, bf16 3.2e-3 to 6.6e-3 (diffusers rounds the time embedding after
its SiLU and rotates in another order), Euler on two schedules 1.8e-7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.checkpoints.base import Checkpoint
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.conditioning import Keyframe, ReferenceBlock
from runtime.h3.config import H3Config
from runtime.h3.denoise import Latents, Side, draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.h3.packing import TargetShape
from runtime.h3.schedule import sigmas_for
from tests.denoiser_parts import CPU, conditioning, demo_plan, normal
from tests.denoiser_parts import side as make_side

diffusers = pytest.importorskip("diffusers", reason="pip install -e .[peers]")

SEED = 7
TAG_OF_KIND = {
    "text": 1, "video": 0, "cond": 0, "ref_img": 0, "audio": 2, "cond_audio": 2, "ref_audio": 2,
}  # fmt: skip
FP32_LIMIT, BF16_LIMIT = 2e-6, 2.5e-2
WRONG = 2 * BF16_LIMIT  # a planted mistake must stand out of both
SIGMAS = (1.0, 0.7, 5e-4)  # 5e-4: the target's time passes the conditions' 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout: target, AdaLN tags of the text, and what it is conditioned on."""

    target: TargetShape
    text_tags: tuple[int, ...]
    references: tuple[ReferenceBlock, ...] = ()
    keyframes: tuple[Keyframe, ...] = ()

    def side(self, model: H3Model) -> Side:
        built = conditioning(self.text_tags, self.references, self.keyframes)
        return make_side(model, built, target=self.target, seed=SEED)


EVEN = TargetShape(latent_t=2, latent_h=4, latent_w=6, audio_t=8)
ODD = TargetShape(latent_t=2, latent_h=3, latent_w=5, audio_t=8)
CASES = {
    "t2va": Case(target=EVEN, text_tags=(1,) * 7),
    "t2va_odd": Case(target=ODD, text_tags=(1,) * 4),
    "ref2va_mixed": Case(
        target=EVEN,
        text_tags=(1, 0, 0, 0, 1, 1, 0, 1, 1),
        references=(
            ReferenceBlock(kind="image", latent=normal(1, 24, 1, 4, 6)),
            ReferenceBlock(
                kind="video_audio",
                latent=normal(1, 24, 2, 4, 4),
                audio_latent=normal(1, 32, 2, 8),
            ),
            ReferenceBlock(kind="video", latent=normal(1, 24, 2, 5, 3)),
            ReferenceBlock(kind="audio", audio_latent=normal(1, 32, 2, 5)),
        ),
    ),
    "fl2va_with_a_sound_guide": Case(
        target=EVEN,
        text_tags=(1, 0, 1),
        keyframes=(
            Keyframe(frame_index=0, latent=normal(1, 24, 1, 4, 6)),
            Keyframe(frame_index=2, audio_latent=normal(1, 32, 2, 3)),
        ),
    ),
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return random_checkpoint("dit", size="tiny", format="full_bf16", seed=SEED)


def our_model(checkpoint: Checkpoint, dtype: str) -> H3Model:
    model, _ = load_denoiser(checkpoint, demo_plan(dtype=dtype), CPU)
    return model


def their_model(
    checkpoint: Checkpoint,
    dtype: str,
    edit: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    qkv_layout: str = "stacked",
) -> nn.Module:
    """diffusers' model filled through its own converter; `edit` plants a mistake in the weights."""
    cfg = H3Config.from_checkpoint(checkpoint)
    names = {
        "num_attention_heads": cfg.num_heads,
        "attention_head_dim": cfg.head_dim,
        "hidden_size": cfg.hidden,
        "num_layers": cfg.num_layers,
        "num_refiner_layers": cfg.num_refiner_layers,
        "ffn_dim": cfg.ffn,
        "text_dim": cfg.text_dim,
        "time_embed_hidden_dim": cfg.time_hidden,
        "time_embed_dim": cfg.time_dim,
    }
    weights = {name: edit(name, checkpoint.tensor(name)) for name in checkpoint.names()}
    if dtype == "fp32":
        weights = {name: tensor.float() for name, tensor in weights.items()}
    parts = _diffusers_parts()
    model = parts.model.MiniMaxH3Transformer3DModel(**names)
    converted = parts.convert(weights, names, qkv_layout=qkv_layout)
    model.load_state_dict(converted, strict=True, assign=True)  # dtypes stay as stored
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    model: ModuleType
    convert: Callable[..., dict[str, Tensor]]


def _diffusers_parts() -> _Parts:
    from diffusers.loaders import single_file_utils
    from diffusers.models.transformers import transformer_minimax_h3

    return _Parts(
        model=transformer_minimax_h3,
        convert=single_file_utils.convert_minimax_h3_transformer_checkpoint_to_diffusers,
    )


def their_velocity(model: nn.Module, case: Case, side: Side, x: Latents, sigma: float) -> Latents:
    """Data-ward velocities of the target, from inputs packed by hand."""
    kinds = [kind for s in side.layout.segments for kind in [s.kind] * (s.stop - s.start)]
    t_video, t_audio = 1 - sigma, 1 - sigma / (4 - 3 * sigma)
    time_of = {"text": t_video, "video": t_video, "audio": t_audio}
    time_of |= dict.fromkeys(("cond", "ref_img"), max(t_video, 0.999))
    time_of |= dict.fromkeys(("cond_audio", "ref_audio"), 1.0)
    times = sorted({time_of[kind] for kind in kinds})
    tags = torch.tensor([TAG_OF_KIND[kind] for kind in kinds])
    tags[: len(case.text_tags)] = torch.tensor(case.text_tags)
    rows = {
        stream: torch.tensor([i for i, kind in enumerate(kinds) if TAG_OF_KIND[kind] == tag])
        for stream, tag in (("video", 0), ("text", 1), ("audio", 2))
    }
    context = conditioning(case.text_tags).context.context
    video, audio = video_rows(x.video.float()), audio_rows(x.audio.float())
    found = model(
        hidden_states=_after(side.inputs.condition_video, video)[None],
        audio_hidden_states=_after(side.inputs.condition_audio, audio)[None],
        encoder_hidden_states=context,
        timestep=torch.tensor(times, dtype=torch.float32),
        timestep_indices=torch.tensor([times.index(time_of[kind]) for kind in kinds]),
        token_tags=tags,
        position_ids=torch.from_numpy(side.layout.positions_S3),
        video_indices=rows["video"],
        audio_indices=rows["audio"],
        text_indices=rows["text"],
    )
    return latents(found.sample[0, -len(video) :], found.audio_sample[0, -len(audio) :], x)


def video_rows(latent: Tensor) -> Tensor:
    """The patch rule written with unfold; odd sides wrap."""
    height, width = latent.shape[-2:]
    wrapped = F.pad(latent, (0, width % 2, 0, height % 2, 0, 0), mode="circular")[0]
    patches = wrapped.unfold(2, 2, 2).unfold(3, 2, 2)  # [C, T, h/2, w/2, 2, 2]
    return torch.einsum("cthwpq->thwcpq", patches).flatten(0, 2).flatten(1)


def audio_rows(latent: Tensor) -> Tensor:
    return torch.cat([latent[0, :, 0].t(), latent[0, :, 1].t()])


def latents(video: Tensor, audio: Tensor, like: Latents) -> Latents:
    """Rows back to latents; the wrapped row and column of odd sides are cut off."""
    _, channels, frames, height, width = like.video.shape
    patches = video.reshape(frames, (height + 1) // 2, (width + 1) // 2, channels, 2, 2)
    whole = torch.einsum("thwcpq->cthpwq", patches).flatten(2, 3).flatten(3, 4)
    return Latents(
        video=whole[None, ..., :height, :width],
        audio=torch.stack(audio.t().chunk(2, dim=1), dim=1)[None],
    )


def _after(conditions: Tensor | None, rows: Tensor) -> Tensor:
    return rows if conditions is None else torch.cat([conditions, rows])


def our_velocity(side: Side, x: Latents, sigma: float) -> tuple[Latents, Tensor]:
    """The noise-ward velocity before the audio is carried, and the audio the network saw."""
    taps: dict[str, Tensor] = {}
    side.velocity(x, torch.tensor(sigma), taps.__setitem__)
    return Latents(video=taps["v_video"], audio=taps["v_audio"]), taps["audio_in"]


def distances(
    ours: H3Model, theirs: nn.Module, case: Case, sigma: float, *, sign: int = -1
) -> tuple[float, float]:
    """Relative L2 of both streams; diffusers' velocity points at the data, ours at the noise."""
    side, noise = case.side(ours), draw_noise(case.target, SEED)
    x = Latents(video=noise.video.to(ours.dtype), audio=noise.audio.to(ours.dtype))
    with torch.inference_mode():
        got, audio_in = our_velocity(side, x, sigma)
        want = their_velocity(theirs, case, side, Latents(video=x.video, audio=audio_in), sigma)
    return relative(got.video, sign * want.video), relative(got.audio, sign * want.audio)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("name", CASES)
def test_fp32_velocities_are_those_of_diffusers(
    checkpoint: Checkpoint, name: str, sigma: float
) -> None:
    found = distances(
        our_model(checkpoint, "fp32"), their_model(checkpoint, "fp32"), CASES[name], sigma
    )
    assert max(found) <= FP32_LIMIT


@pytest.mark.parametrize("name", CASES)
def test_bf16_velocities_are_those_of_diffusers_but_for_rounding(
    checkpoint: Checkpoint, name: str
) -> None:
    found = distances(
        our_model(checkpoint, "bf16"), their_model(checkpoint, "bf16"), CASES[name], 0.7
    )
    assert max(found) <= BF16_LIMIT


def test_the_comparison_sees_swapped_swiglu_halves(checkpoint: Checkpoint) -> None:
    def swap(name: str, tensor: Tensor) -> Tensor:
        return torch.cat(tensor.chunk(2)[::-1]) if name.endswith("mlp.fc1.weight") else tensor

    theirs = their_model(checkpoint, "fp32", swap)
    assert min(distances(our_model(checkpoint, "fp32"), theirs, CASES["t2va"], 0.7)) > WRONG


def test_the_comparison_sees_a_flipped_sign(checkpoint: Checkpoint) -> None:
    ours, theirs = our_model(checkpoint, "fp32"), their_model(checkpoint, "fp32")
    assert min(distances(ours, theirs, CASES["t2va"], 0.7, sign=1)) > WRONG


def test_the_comparison_sees_interleaved_qkv_rows(checkpoint: Checkpoint) -> None:
    theirs = their_model(checkpoint, "fp32", qkv_layout="interleaved")
    assert min(distances(our_model(checkpoint, "fp32"), theirs, CASES["t2va"], 0.7)) > WRONG


def test_the_comparison_sees_text_tags_that_are_all_text(checkpoint: Checkpoint) -> None:
    case = CASES["ref2va_mixed"]
    plain = Case(
        target=case.target, text_tags=(1,) * len(case.text_tags), references=case.references
    )
    ours, theirs = our_model(checkpoint, "fp32"), their_model(checkpoint, "fp32")
    side, noise = case.side(ours), draw_noise(case.target, SEED)
    with torch.inference_mode():
        got, audio_in = our_velocity(side, noise, 0.7)
        seen = Latents(video=noise.video, audio=audio_in)
        want = their_velocity(theirs, plain, side, seen, 0.7)
    assert relative(got.video, -want.video) > 100 * FP32_LIMIT


@pytest.mark.parametrize("steps", [4, 8, 20])
def test_the_simple_schedule_is_diffusers_grid_when_the_steps_divide_1000(steps: int) -> None:
    for shift in (12.0, 3.0):
        scheduler = diffusers.MiniMaxH3Scheduler(shift=shift)
        scheduler.set_timesteps(steps + 1)
        ours = sigmas_for("simple", steps, shift)
        torch.testing.assert_close(ours, scheduler.sigmas, rtol=0, atol=2e-7)


def two_schedules(
    network: Callable[[Latents, float], Latents], noise: Latents, steps: int
) -> Latents:
    """diffusers' sampling: each stream on its own schedule, neither knows of the other."""
    video_scheduler = diffusers.MiniMaxH3Scheduler(shift=12.0)
    audio_scheduler = diffusers.MiniMaxH3Scheduler(shift=3.0)
    for scheduler in (video_scheduler, audio_scheduler):
        scheduler.set_timesteps(steps + 1)
    video, audio = noise.video, noise.audio
    times = zip(video_scheduler.timesteps, audio_scheduler.timesteps, strict=True)
    for t_video, t_audio in times:
        velocity = network(Latents(video=video, audio=audio), 1 - float(t_video))
        video = video_scheduler.step(velocity.video, t_video, video).prev_sample
        audio = audio_scheduler.step(velocity.audio, t_audio, audio).prev_sample
    return Latents(video=video, audio=audio)


@pytest.mark.parametrize("network", ["ours", "theirs"])
def test_carried_euler_is_separate_euler_on_two_schedules(
    checkpoint: Checkpoint, network: str
) -> None:
    case, steps = CASES["ref2va_mixed"], 8
    ours, theirs = our_model(checkpoint, "fp32"), their_model(checkpoint, "fp32")
    side, noise = case.side(ours), draw_noise(case.target, SEED)

    def our_network(x: Latents, sigma: float) -> Latents:
        carried = Latents(video=x.video, audio=x.audio * (4 - 3 * sigma))  # sigma_v / sigma_a
        velocity, _ = our_velocity(side, carried, sigma)
        return Latents(video=-velocity.video, audio=-velocity.audio)

    def their_network(x: Latents, sigma: float) -> Latents:
        return their_velocity(theirs, case, side, x, sigma)

    with torch.inference_mode():
        got = sample(
            side,
            None,
            cfg=1.0,
            sampler="euler",
            sigmas=sigmas_for("simple", steps, 12.0),
            noise=noise,
            start=None,
            on_step=lambda step: None,
        )
        want = two_schedules({"ours": our_network, "theirs": their_network}[network], noise, steps)
    assert relative(got.video, want.video) <= 1e-6
    assert relative(got.audio, want.audio) <= 1e-6


def test_diffusers_refuses_pruned_weights_so_the_full_form_is_what_it_checks() -> None:
    pruned = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    weights = {name: pruned.tensor(name) for name in pruned.names()}
    with pytest.raises(ValueError, match="pruned"):
        _diffusers_parts().convert(weights, {})
