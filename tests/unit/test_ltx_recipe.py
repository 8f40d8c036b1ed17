"""LTX from a prompt and a picture to frames and a wave, on random tiny parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.encode_cache import EncodeCache
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.audio_vae import AudioDecoder, load_audio_decoder
from runtime.ltx.conditioning import (
    Conditioning,
    Encoders,
    FirstFrame,
    build_conditioning,
    clean_tokens,
    prepare,
)
from runtime.ltx.demo import random_denoiser
from runtime.ltx.denoise import StepResult, Streams, Velocity
from runtime.ltx.load import load_connectors, load_denoiser
from runtime.ltx.model import Contexts
from runtime.ltx.recipe import generate_latents, two_stages
from runtime.ltx.sizes import LTXShape
from runtime.ltx.text_tower import TextTower, load_text_tower
from runtime.ltx.tiny_components import ComponentFolders
from runtime.ltx.upsampler import Upsampler, load_upsampler
from runtime.ltx.video_vae import VideoVAE, load_video_vae

CPU, FP32 = torch.device("cpu"), torch.float32
DENOISER = random_denoiser("tiny", "bf16")
CONFIG = DENOISER.census.config
SHAPE = LTXShape(frames=17, height=128, width=192, fps=24.0)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folders(ltx_components: ComponentFolders) -> ComponentFolders:
    return ltx_components


@pytest.fixture(scope="module")
def tower(folders: ComponentFolders) -> TextTower:
    return load_text_tower(folders.text_encoder, CONFIG, device=CPU, dtype=FP32)


@pytest.fixture(scope="module")
def video_vae(folders: ComponentFolders) -> VideoVAE:
    return load_video_vae(folders.video_vae, channels=CONFIG.in_channels, device=CPU, dtype=FP32)[0]


@pytest.fixture(scope="module")
def audio(folders: ComponentFolders) -> AudioDecoder:
    return load_audio_decoder(folders.audio_vae, folders.vocoder, device=CPU)[0]


@pytest.fixture(scope="module")
def upsampler(folders: ComponentFolders, video_vae: VideoVAE) -> Upsampler:
    return load_upsampler(folders.upsampler, video_vae, dtype=FP32)[0]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Counted:
    """Counts the calls of an encoder."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.calls = inner, 0

    def encode(self, value: Any, *, cancelled: Callable[[], bool]) -> Any:
        self.calls += 1
        return self.inner(value, cancelled=cancelled)


def picture(width: int = 300, height: int = 200, name: str = "p") -> FirstFrame:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x % 256, y % 256, (x + y) % 256], axis=-1).astype(np.uint8)
    return FirstFrame(pixels_HWC=pixels, content_hash=name)


def encoders_of(tower: Any, connectors: Any, video_vae: Any) -> Encoders:
    return Encoders(
        text=lambda: tower,
        connectors=connectors,
        text_identity="t",
        video_vae=video_vae,
        video_vae_identity="v",
    )


def test_a_prompt_and_a_picture_become_frames_and_a_wave(
    tower: TextTower, video_vae: VideoVAE, audio: AudioDecoder, upsampler: Upsampler
) -> None:
    attend = load_ltx_attention("sdpa", CONFIG, CPU, FP32)
    model, _ = load_denoiser(DENOISER, attend, device=CPU, dtype=FP32)
    connectors = load_connectors(DENOISER, attend, device=CPU, dtype=FP32)
    encoders = encoders_of(tower, connectors, video_vae)
    stages = two_stages(SHAPE)
    conditioning = build_conditioning(
        "a red ball on grass",
        picture(),
        [stage.shape for stage in stages],
        encoders,
        EncodeCache(1 << 30),
        stage=lambda name: nullcontext(),
    )
    assert [tuple(z.shape) for z in conditioning.first_frames] == [
        (1, CONFIG.in_channels, 1, 2, 3),
        (1, CONFIG.in_channels, 1, 4, 6),
    ]
    steps: list[StepResult] = []

    def run(seed: int) -> Any:
        return generate_latents(
            stages,
            lambda stage: Velocity(
                model, conditioning.contexts, stage.shape.latent, stage.shape.fps
            ),
            conditioning,
            upsampler,
            CONFIG,
            seed=seed,
            device=CPU,
            on_step=steps.append,
        )

    latents = run(3)
    assert [step.step for step in steps] == list(range(11))
    assert [tuple(s.x.video.shape[:2]) for s in steps] == [(1, 18)] * 8 + [(1, 72)] * 3
    assert torch.equal(latents.video[:, :, :1], conditioning.first_frames[1])
    again, other = run(3), run(4)
    assert torch.equal(latents.video, again.video) and torch.equal(latents.audio, again.audio)
    assert not torch.equal(latents.audio, other.audio)

    frames = torch.cat(list(video_vae.decode_stream(latents.video, as_bytes=True)))
    assert frames.shape == (17, 128, 192, 3) and frames.dtype == torch.uint8
    wave = audio.decode(latents.audio)
    assert wave.shape == (1, 2, (4 * SHAPE.latent.audio - 3) * 480)
    assert float(frames.float().std()) > 1 and float(wave.std()) > 0


def test_the_second_stage_starts_from_the_doubled_latents_of_the_first(
    video_vae: VideoVAE, upsampler: Upsampler
) -> None:
    """By a velocity of zero: the state then is the start, and every prediction is the state."""
    stages = two_stages(SHAPE)
    contexts = Contexts(video_BLD=noise(1, 4, 8), audio_BLD=noise(1, 4, 8))
    first_frames = tuple(
        noise(1, CONFIG.in_channels, 1, s.shape.latent.height, s.shape.latent.width) for s in stages
    )
    steps: list[StepResult] = []
    generate_latents(
        stages,
        lambda stage: lambda x, times: Streams(video=0 * x.video, audio=0 * x.audio),
        Conditioning(contexts=contexts, first_frames=first_frames),
        upsampler,
        CONFIG,
        seed=7,
        device=CPU,
        on_step=steps.append,
    )
    generator = torch.Generator().manual_seed(7)
    half, full = (stage.shape.latent for stage in stages)
    channels = CONFIG.in_channels
    start = torch.randn(1, half.video_tokens, channels, generator=generator)
    start_audio = torch.randn(1, half.audio, 128, generator=generator)
    live = slice(half.frame_tokens, None)
    assert torch.equal(steps[0].x.video[:, live], start[:, live])
    assert torch.equal(steps[0].x.audio, start_audio)
    end = steps[7].denoised
    doubled = upsampler.double(end.video.transpose(1, 2).unflatten(2, (3, 2, 3)))
    fresh = torch.randn(1, full.video_tokens, channels, generator=generator)
    fresh_audio = torch.randn(1, full.audio, 128, generator=generator)
    live = slice(full.frame_tokens, None)
    expected = torch.lerp(doubled.flatten(2).transpose(1, 2), fresh, 0.909375)
    assert torch.equal(steps[8].x.video[:, live], expected[:, live])
    assert torch.equal(steps[8].x.audio, torch.lerp(end.audio, fresh_audio, 0.909375))
    given = first_frames[1].flatten(2).transpose(1, 2)
    assert torch.equal(steps[8].x.video[:, : full.frame_tokens], given)


def test_prompt_and_picture_are_encoded_once(tower: TextTower, video_vae: VideoVAE) -> None:
    text, frames = Counted(tower.encode), Counted(video_vae.encode)
    connectors = load_connectors(
        DENOISER, load_ltx_attention("sdpa", CONFIG, CPU, FP32), device=CPU, dtype=FP32
    )
    encoders, cache, stages = encoders_of(text, connectors, frames), EncodeCache(1 << 30), []

    def stage(name: str) -> Any:
        stages.append(name)
        return nullcontext()

    def build(prompt: str, given: FirstFrame | None) -> Any:
        shapes = [SHAPE.half, SHAPE]
        return build_conditioning(prompt, given, shapes, encoders, cache, stage=stage)

    first = build("a", picture())
    again = build(" a ", picture())
    assert (text.calls, frames.calls) == (1, 2)
    assert first.contexts is again.contexts
    build("b", picture(name="q"))
    assert (text.calls, frames.calls) == (2, 4)
    assert build("b", None).first_frames == ()
    assert stages == ["text encode", "reference encode"] * 3 + ["text encode"]


def test_a_first_frame_is_compressed_and_cut_to_the_clips_aspect() -> None:
    from diffusers.pipelines.ltx2.utils import LTX2_5_IMAGE_CRF, apply_image_conditioning_crf
    from diffusers.video_processor import VideoProcessor
    from PIL import Image

    same = picture(300, 200)  # of the clip's aspect
    ours = prepare(same, SHAPE)
    lossy = Image.fromarray(apply_image_conditioning_crf(same.pixels_HWC, LTX2_5_IMAGE_CRF))
    theirs = VideoProcessor(vae_scale_factor=32).preprocess(lossy, height=128, width=192)
    assert torch.equal(ours.permute(0, 3, 1, 2) * 2 - 1, theirs)
    assert same.note(SHAPE) is None
    note = picture(401, 200).note(SHAPE)
    assert note == ("the first frame, 401x200, is cut to its middle 300x200, the aspect of 192x128")
    wide = prepare(picture(400, 200), SHAPE)
    assert float(wide[0, 64, 0, 0]) == pytest.approx(50 / 255, abs=0.03)  # red counts columns


def test_frozen_tokens_are_the_first_latent_frame() -> None:
    z = noise(1, 4, 1, 4, 6)
    clean = clean_tokens(z, SHAPE.latent, 4)
    assert torch.equal(clean.tokens_BNC[:, :24], z.flatten(2).transpose(1, 2))
    assert not clean.live_BN[:, :24].any() and clean.live_BN[:, 24:].all()
    assert clean_tokens(None, SHAPE.latent, 4).live_BN.all()


def test_a_picture_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be uint8 \[height, width, 3\]"):
        FirstFrame(pixels_HWC=np.zeros((4, 4), np.uint8), content_hash="")
