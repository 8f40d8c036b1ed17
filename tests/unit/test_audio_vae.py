"""The audio VAE with small random weights: sizes, stereo, resampling, loudness, cancelling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints.base import CheckpointError
from runtime.h3.audio_vae import (
    AudioVAE,
    Snake,
    SnakeBeta,
    build_audio_vae,
    fit_stereo,
    loudness_guard,
    resample,
)
from runtime.h3.sizes import audio_latents_of_samples, resampled_length
from runtime.nonfinite import NonFinite

ENCODER = (4, 8, 12, 16, 20, 24)  # channels after the first convolution and each stage
STRIDES = (2, 4, 4, 5, 5)
DECODER = (24, 16, 12, 8, 6, 4, 2, 1)
UP_KERNELS = (9, 9, 4, 4, 4, 4, 4)
AMP_KERNELS = (3, 7, 11)
WIDTH, HIDDEN = 64, 48


def small_shapes() -> dict[str, tuple[int, ...]]:
    """Just the shapes that the widths are read from."""
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.block.0.weight": (ENCODER[0], 1, 7),
        "encoder.block.7.weight": (WIDTH, ENCODER[-1], 3),
        "pre_block.proj.weight": (32, WIDTH),
        "pre_block.mlp.w0.weight": (HIDDEN, 32),
        "mean_proj.weight": (32, 32, 1),
        "dec_in_proj.weight": (WIDTH, 32, 1),
        "decoder.conv_pre.weight": (DECODER[0], WIDTH, 7),
        "decoder.conv_post.weight": (1, DECODER[-1], 7),
        "decoder.activation_post.upsample.filter": (1, 1, 12),
    }
    for i, stride in enumerate(STRIDES):
        name = f"encoder.block.{i + 1}.block.4.weight"
        shapes[name] = (ENCODER[i + 1], ENCODER[i], 2 * stride)
    for i, kernel in enumerate(UP_KERNELS):
        shapes[f"decoder.ups.{i}.0.weight"] = (DECODER[i], DECODER[i + 1], kernel)
        for j, amp in enumerate(AMP_KERNELS):
            channels = DECODER[i + 1]
            shapes[f"decoder.resblocks.{3 * i + j}.convs1.0.weight"] = (channels, channels, amp)
    return shapes


@pytest.fixture(scope="module")
def vae() -> AudioVAE:
    torch.manual_seed(0)
    model = AudioVAE(small_shapes()).requires_grad_(False).eval()
    half = torch.tensor([0.00203, 0.00939, -0.02554, -0.05766, 0.12857, 0.44321])
    for name, value in model.state_dict().items():
        if name.endswith("filter"):
            value.copy_(torch.cat([half, half.flip(0)])[None, None])
        elif "alpha" in name or "beta" in name or name.endswith("std"):
            value.copy_(torch.rand(value.shape) + 0.5)
        else:
            value.copy_(torch.randn(value.shape) * 0.3)
    return model


class Stored:
    """A checkpoint of tensors in memory."""

    layers: dict[str, object] = {}  # noqa: RUF012 - never written
    quantised = False
    metadata: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype


def test_the_model_has_the_917_tensors_of_the_published_file(vae: AudioVAE) -> None:
    assert len(vae.state_dict()) == 917
    assert sum(name.endswith("filter") for name in vae.state_dict()) == 254


def test_a_model_built_from_a_checkpoint_has_its_shapes_and_no_memory(vae: AudioVAE) -> None:
    built = build_audio_vae(Stored(vae.state_dict()))
    assert {n: t.shape for n, t in built.state_dict().items()} == {
        n: t.shape for n, t in vae.state_dict().items()
    }
    assert all(t.is_meta for t in built.state_dict().values())


def test_a_half_precision_file_is_refused(vae: AudioVAE) -> None:
    tensors = dict(vae.state_dict())
    tensors["mean_proj.bias"] = tensors["mean_proj.bias"].half()
    with pytest.raises(CheckpointError, match=r"float32 only, but mean_proj.bias is torch.float16"):
        build_audio_vae(Stored(tensors))


def test_a_file_without_a_needed_tensor_names_it(vae: AudioVAE) -> None:
    tensors = dict(vae.state_dict())
    del tensors["decoder.ups.3.0.weight"]
    with pytest.raises(CheckpointError, match=r"decoder\.ups\.3\.0\.weight"):
        build_audio_vae(Stored(tensors))


@pytest.mark.parametrize("length", [800, 1599, 4000, 4799])
def test_encoding_gives_one_latent_per_800_samples(vae: AudioVAE, length: int) -> None:
    latent = vae.encode(torch.randn(1, 2, length))
    assert latent.shape == (1, 32, 2, length // 800)
    assert latent.is_contiguous()


def test_decoding_gives_800_samples_per_latent_within_one(vae: AudioVAE) -> None:
    wave = vae.decode(torch.randn(1, 32, 2, 5) * 100)
    assert wave.shape == (1, 2, 4000)
    assert wave.abs().max() == 1  # clamped, not squashed


def test_length_is_cut_from_the_middle() -> None:
    wave = torch.arange(1003.0).expand(1, 2, -1)
    assert torch.equal(fit_stereo(wave)[0, 0], torch.arange(101.0, 901.0))


def test_mono_is_replicated_and_channels_beyond_two_are_cut(vae: AudioVAE) -> None:
    wave = torch.randn(1, 5, 1600)
    assert torch.equal(vae.encode(wave), vae.encode(wave[:, :2]))
    mono = vae.encode(wave[:, :1])
    assert torch.equal(mono[:, :, 0], mono[:, :, 1])


def test_a_sound_below_25_ms_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match=r"at least 25 ms .* got 799 samples"):
        fit_stereo(torch.zeros(1, 2, 799))


def test_a_tone_on_the_left_only_changes_the_left_latents(vae: AudioVAE) -> None:
    wave = torch.zeros(1, 2, 3200)
    silent = vae.encode(wave)
    wave[0, 0] = torch.sin(torch.arange(3200) * 0.1)
    tone = vae.encode(wave)
    assert torch.equal(tone[:, :, 1], silent[:, :, 1])
    assert not torch.equal(tone[:, :, 0], silent[:, :, 0])


def test_decoding_keeps_left_and_right_apart(vae: AudioVAE) -> None:
    latent = torch.randn(1, 32, 2, 3)
    swapped = vae.decode(latent.flip(2))
    assert torch.allclose(vae.decode(latent), swapped.flip(1), atol=1e-5)


def test_latents_are_normalised_by_the_files_mean_and_std(vae: AudioVAE) -> None:
    mean = torch.randn(2, 32, 4)
    latent = vae.normalised(mean)
    assert torch.allclose(vae.denormalised(latent), mean, atol=1e-5)
    want = (mean[1, 7, 2] - vae.latents_mean[7]) / vae.latents_std[7]
    assert latent[0, 7, 1, 2] == want


def test_later_sound_never_changes_the_attention_of_earlier_latents(vae: AudioVAE) -> None:
    x = torch.randn(2, 6, WIDTH)
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, 2, WIDTH)
    before, after = vae.pre_block(x), vae.pre_block(changed)
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-5)
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-2)


def test_snakes_match_their_formula_in_double_precision() -> None:
    x = torch.randn(2, 3, 50)
    plain, logs = Snake(3), SnakeBeta(3)
    with torch.no_grad():
        plain.alpha.copy_(torch.tensor([0.5, 1.0, 3.0])[None, :, None])
        logs.alpha.copy_(torch.tensor([0.1, -0.5, 0.7]))
        logs.beta.copy_(torch.tensor([-0.3, 0.2, 0.9]))
        a = plain.alpha.double()
        want = x + torch.sin(a * x.double()) ** 2 / (a + 1e-9)
        assert torch.allclose(plain(x).double(), want, atol=1e-6)
        a, b = (p.double().exp()[None, :, None] for p in (logs.alpha, logs.beta))
        want = x + torch.sin(a * x.double()) ** 2 / (b + 1e-9)
        assert torch.allclose(logs(x).double(), want, atol=1e-6)


def test_cancelling_stops_between_stages(vae: AudioVAE) -> None:
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(Cancelled):
        vae.encode(torch.randn(1, 2, 800), cancelled=cancelled)
    assert len(asked) == 3
    asked.clear()
    with pytest.raises(Cancelled):
        vae.decode(torch.randn(1, 32, 2, 1), cancelled=cancelled)
    assert len(asked) == 3


def test_a_broken_latent_stops_the_run_by_name(vae: AudioVAE) -> None:
    latent = torch.zeros(1, 32, 2, 2)
    latent[0, 0, 0, 0] = math.nan
    with pytest.raises(NonFinite, match="audio VAE decode"):
        vae.decode(latent)


# ---- loudness


def test_quiet_sound_passes_the_loudness_guard_unchanged() -> None:
    wave = torch.randn(1, 2, 4000) * 0.1
    assert torch.equal(loudness_guard(wave), wave)


def test_loud_sound_is_divided_by_five_times_its_unbiased_deviation() -> None:
    wave = torch.randn(1, 2, 4000).clamp(-1, 1)
    want = wave.double() / (5 * wave.double().flatten().std(correction=1))
    assert torch.allclose(loudness_guard(wave).double(), want, atol=1e-6)


# ---- resampling


def sinc_reference(wave: Tensor, orig: int, new: int) -> Tensor:
    """The windowed sinc summed directly in float64 over the whole wave."""
    gcd = math.gcd(orig, new)
    orig, new = orig // gcd, new // gcd
    base = min(orig, new) * 0.99
    length = wave.shape[-1]
    times = torch.arange(math.ceil(new * length / orig), dtype=torch.float64) / new
    t = (torch.arange(length, dtype=torch.float64)[None] / orig - times[:, None]) * base
    window = torch.cos(t.clamp(-6, 6) * math.pi / 12) ** 2
    kernel = torch.sinc(t) * window * (t.abs() < 6) * base / orig
    return wave.double() @ kernel.T


@pytest.mark.parametrize(
    ("orig", "length"), [(44100, 1001), (48000, 1200), (22050, 333), (8000, 500), (11025, 64)]
)
def test_resampling_equals_a_double_precision_sinc(orig: int, length: int) -> None:
    wave = torch.randn(1, 2, length, generator=torch.Generator().manual_seed(3))
    got, want = resample(wave, orig, 32000), sinc_reference(wave, orig, 32000)
    assert got.shape[:2] == (1, 2)
    assert abs(got.shape[-1] - want.shape[-1]) <= 1
    kept = got.shape[-1]
    assert (got.double() - want[..., :kept]).norm() / want.norm() < 1e-4


def test_equal_rates_return_the_wave_itself() -> None:
    wave = torch.randn(1, 1, 10)
    assert resample(wave, 32000, 32000) is wave


@pytest.mark.parametrize("orig", [22050, 44100, 48000, 96000])
def test_resampling_keeps_pitch_and_level(orig: int) -> None:
    tone = torch.sin(2 * math.pi * 440 * torch.arange(orig) / orig)[None, None]
    out = resample(tone, orig, 32000)[0, 0]
    assert len(out) == 32000
    spectrum = torch.fft.rfft(out).abs()
    assert int(spectrum.argmax()) == 440  # bins are 1 Hz wide
    assert abs(float(out[1000:-1000].abs().max()) - 1) < 2e-3


def test_tones_above_the_new_limit_do_not_fold_back() -> None:
    tone = torch.sin(2 * math.pi * 20000 * torch.arange(48000) / 48000)[None, None]
    assert float(resample(tone, 48000, 32000)[0, 0, 1000:-1000].abs().max()) < 0.02


def test_the_length_follows_the_float32_ceiling_of_comfyui() -> None:
    assert resampled_length(6615, 44100, 32000) == 4800
    assert resampled_length(6616, 44100, 32000) == 4801
    # 320 * 1000352 / 441 = 725879.0023: float32 has no such number, so nothing is left to round up
    assert 320 * 1000352 % 441 == 1
    assert resampled_length(1000352, 44100, 32000) == 725879
    assert resample(torch.zeros(1, 1, 1000352), 44100, 32000).shape[-1] == 725879


def test_latents_of_a_sound_are_counted_before_it_is_loaded() -> None:
    assert audio_latents_of_samples(8399, 32000) == 10
    assert audio_latents_of_samples(6615, 44100) == 6
    assert audio_latents_of_samples(8820, 44100) == 8


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0 Hz, got 0"):
        resample(torch.zeros(1, 1, 8), 0, 32000)
