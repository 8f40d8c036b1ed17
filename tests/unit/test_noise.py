"""Noise of a seed: the values of the contract (A3) and the rule for condition rows (1.9)."""

from __future__ import annotations

import torch

from runtime.h3.conditioning import Keyframe, ReferenceBlock
from runtime.h3.denoise import draw_noise
from runtime.h3.model import pack_audio, patchify
from runtime.h3.packing import TargetShape
from tests.denoiser_parts import conditioning, denoiser, normal, side

SEED = 440202
REFERENCE = TargetShape(latent_t=37, latent_h=34, latent_w=60, audio_t=207)
VIDEO_START = (-0.9130141735, 0.4611488283, 1.3625814915, 0.2872493863, 0.7326831222, 1.2890439034)
VIDEO_END = (1.5734419823, -0.2192557752)
AUDIO_START = (
    -1.3211778402,
    -0.2848374248,
    1.8624542952,
    -0.7330766916,
    0.9150810242,
    1.8867554665,
)
AUDIO_END = (-0.1214712709, -0.3763376772)


def test_the_reference_seed_draws_the_contracts_numbers() -> None:
    noise = draw_noise(REFERENCE, SEED)
    assert noise.video.shape == (1, 24, 37, 34, 60)
    assert noise.audio.shape == (1, 32, 2, 207)
    for got, start, end in (
        (noise.video.flatten(), VIDEO_START, VIDEO_END),
        (noise.audio.flatten(), AUDIO_START, AUDIO_END),
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got[:6], torch.tensor(start))
        assert torch.equal(got[-2:], torch.tensor(end))


def test_audio_continues_the_generator_of_the_video() -> None:
    target = TargetShape(latent_t=2, latent_h=4, latent_w=6, audio_t=8)
    generator = torch.Generator().manual_seed(3)
    video = torch.randn(1, 24, 2, 4, 6, generator=generator)
    audio = torch.randn(1, 32, 2, 8, generator=generator)
    noise = draw_noise(target, 3)
    assert torch.equal(noise.video, video) and torch.equal(noise.audio, audio)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    draw_noise(TargetShape(latent_t=1, latent_h=2, latent_w=2, audio_t=1), 99)
    assert torch.equal(torch.rand(3), want)


def test_every_condition_picture_repeats_the_start_of_the_noise() -> None:
    first, second = normal(1, 24, 1, 4, 6), normal(1, 24, 2, 4, 4)
    built = conditioning(
        references=(ReferenceBlock(kind="image", latent=first),),
        keyframes=(Keyframe(frame_index=0, latent=second),),
    )
    rows = side(denoiser(), built, seed=SEED).inputs.condition_video
    assert rows is not None and rows.dtype == torch.float32
    stored = torch.cat([patchify(second), patchify(first)])  # keyframes first
    noise = torch.cat(
        [
            torch.randn(n, 96, generator=torch.Generator().manual_seed(SEED))
            for n in (len(patchify(second)), len(patchify(first)))
        ]
    )
    assert torch.equal(noise[0, :6], torch.tensor(VIDEO_START))
    assert torch.equal(rows, 0.999 * stored + (1 - 0.999) * noise)


def test_condition_sounds_get_no_noise() -> None:
    sound = normal(1, 32, 2, 5)
    built = conditioning(references=(ReferenceBlock(kind="audio", audio_latent=sound),))
    inputs = side(denoiser(), built, seed=SEED).inputs
    assert inputs.condition_audio is not None
    assert torch.equal(inputs.condition_audio, pack_audio(sound))
    assert inputs.condition_video is None
