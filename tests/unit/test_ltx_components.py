"""VAEs, vocoder and upsampler of LTX: random tiny folders of diffusers, loaded and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints.header import CheckpointError
from runtime.kernels.unavailable import Unavailable
from runtime.ltx import components
from runtime.ltx.audio_vae import AudioDecoder, load_audio_decoder
from runtime.ltx.demo import random_denoiser
from runtime.ltx.folders import compression
from runtime.ltx.packing import audio_tokens
from runtime.ltx.tiny_components import ComponentFolders
from runtime.ltx.upsampler import Upsampler, load_upsampler
from runtime.ltx.video_vae import VideoVAE, load_video_vae
from runtime.nonfinite import NonFinite

CPU, FP32 = torch.device("cpu"), torch.float32
DENOISER = random_denoiser("tiny", "bf16")
CONFIG = DENOISER.census.config


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folders(ltx_components: ComponentFolders) -> ComponentFolders:
    return ltx_components


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


def test_latents_are_normalised_per_channel(video_vae: VideoVAE) -> None:
    frames = torch.rand(9, 64, 96, 3, generator=torch.Generator().manual_seed(1))
    latent = video_vae.encode(frames)
    pixels = (frames.permute(3, 0, 1, 2)[None] * 2 - 1).float()
    raw = video_vae.module.encode(pixels).latent_dist.mode()
    mean, std = video_vae.module.latents_mean, video_vae.module.latents_std
    assert latent.shape == (1, CONFIG.in_channels, 2, 2, 3)
    for channel in range(CONFIG.in_channels):
        expected = (raw[:, channel] - mean[channel]) / std[channel]
        assert torch.equal(latent[:, channel], expected)
    assert torch.allclose(video_vae.denormalised(latent), raw, atol=1e-6)


def test_decoded_chunks_are_diffusers_frames(video_vae: VideoVAE) -> None:
    latent, parts = noise(1, CONFIG.in_channels, 4, 2, 3), []
    chunks = list(
        video_vae.decode_stream(
            latent, as_bytes=False, on_part=lambda done, total: parts.append((done, total))
        )
    )
    assert [len(chunk) for chunk in chunks] == [16, 9]
    raw = video_vae.module.decode(video_vae.denormalised(latent)).sample
    expected = (raw[0].permute(1, 2, 3, 0) * 0.5 + 0.5).clamp(0, 1)
    assert torch.equal(torch.cat(chunks), expected)
    assert parts == [(done, 5) for done in range(6)]
    as_bytes = torch.cat(list(video_vae.decode_stream(latent, as_bytes=True)))
    assert torch.equal(as_bytes, (expected * 255 + 0.5).to(torch.uint8))


def test_half_types_round_the_modules_and_not_the_statistics(
    folders: ComponentFolders, video_vae: VideoVAE, upsampler: Upsampler
) -> None:
    half = torch.bfloat16
    vae, _ = load_video_vae(folders.video_vae, channels=CONFIG.in_channels, device=CPU, dtype=half)
    latent = noise(1, CONFIG.in_channels, 2, 2, 3)
    rounding = 2**-6  # a few of bf16's 2^-9 each, added up
    assert vae.module.dtype == half
    assert torch.equal(vae.denormalised(latent), video_vae.denormalised(latent))
    ours, exact = (
        torch.cat(list(v.decode_stream(latent, as_bytes=False))) for v in (vae, video_vae)
    )
    assert 0 < float((ours - exact).abs().mean()) < rounding
    doubling, _ = load_upsampler(folders.upsampler, vae, dtype=half)
    doubled, wanted = doubling.double(latent), upsampler.double(latent)
    assert doubled.dtype == FP32
    assert 0 < float((doubled - wanted).norm() / wanted.norm()) < rounding


def test_the_decoder_stops_between_its_blocks_and_names_bad_latents(video_vae: VideoVAE) -> None:
    latent, parts = noise(1, CONFIG.in_channels, 2, 2, 2), []
    with pytest.raises(Cancelled):
        list(
            video_vae.decode_stream(
                latent,
                as_bytes=True,
                cancelled=lambda: len(parts) == 2,
                on_part=lambda done, total: parts.append(done),
            )
        )
    assert parts == [0, 1]
    with pytest.raises(NonFinite, match="video VAE decode produced non-finite values"):
        list(video_vae.decode_stream(latent * float("nan"), as_bytes=True))
    with pytest.raises(ValueError, match="encodes 8k\\+1 frames in multiples of 32 pixels"):
        video_vae.encode(torch.zeros(8, 64, 64, 3))


def test_audio_statistics_are_applied_in_packed_order(audio: AudioDecoder) -> None:
    latent = noise(1, 8, 5, 16)
    ours = audio.denormalised(latent)
    for channel in range(8):
        for bin in range(16):
            packed = channel * 16 + bin
            std, mean = audio.vae.latents_std[packed], audio.vae.latents_mean[packed]
            expected = latent[:, channel, :, bin] * std + mean
            assert torch.equal(ours[:, channel, :, bin], expected)
    assert audio_tokens(latent).shape == (1, 5, 128)


def test_the_wave_is_the_vocoders_of_the_decoded_mel(audio: AudioDecoder) -> None:
    latent = noise(1, 8, 5, 16)
    mel = audio.vae.decode(audio.denormalised(latent)).sample
    assert mel.shape == (1, 2, 17, 64)
    wave = audio.decode(latent)
    assert wave.shape == (1, 2, 17 * 480)
    assert torch.equal(wave, audio.vocoder(mel))
    with pytest.raises(Cancelled):
        audio.decode(latent, cancelled=lambda: True)


def test_doubling_happens_on_the_vaes_own_scale(upsampler: Upsampler, video_vae: VideoVAE) -> None:
    from diffusers.pipelines.ltx2.pipeline_ltx2_latent_upsample import LTX2LatentUpsamplePipeline

    latent = noise(1, CONFIG.in_channels, 3, 2, 3)
    doubled = upsampler.double(latent)
    assert doubled.shape == (1, CONFIG.in_channels, 3, 4, 6)
    pipeline = LTX2LatentUpsamplePipeline(vae=video_vae.module, latent_upsampler=upsampler.module)
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        latents=latent, latents_normalized=True, output_type="latent", return_dict=False
    )[0]
    assert torch.equal(doubled, video_vae.normalised(theirs))


# ---- refusals


def change(folder: Path, to: Path, **options: object) -> Path:
    """A copy of a component's folder whose config says something else."""
    copy = shutil.copytree(folder, to, dirs_exist_ok=True)
    table = json.loads((copy / "config.json").read_text()) | options
    (copy / "config.json").write_text(json.dumps(table))
    return copy


def load_vae(folder: Path) -> None:
    load_video_vae(folder, channels=CONFIG.in_channels, device=CPU, dtype=FP32)


def test_a_name_that_is_no_folder_is_never_looked_up(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Some/Hub-Name is no existing folder, but the video"):
        load_vae(Path("Some/Hub-Name"))
    with pytest.raises(CheckpointError, match=r"holds no config.json"):
        load_vae(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "vae.safetensors")
    with pytest.raises(CheckpointError, match="is a file, but the video VAE is given as a local"):
        load_vae(tmp_path / "vae.safetensors")


@pytest.mark.parametrize("name", ["decoder.conv_in_x_t.weight", "conv_in_x_t.weight"])
def test_the_diffusion_decoder_is_refused_by_its_key(tmp_path: Path, name: str) -> None:
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    for given in (tmp_path / "model.safetensors", tmp_path):
        (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKLLTX2Video"}')
        with pytest.raises(CheckpointError, match=r"is the diffusion decoder .* not implemented"):
            load_vae(given)


def test_another_class_and_unknown_options_are_refused(
    folders: ComponentFolders, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="of class 'LTX2VocoderWithBWE', but the video VAE"):
        load_vae(folders.vocoder)
    strange = change(folders.video_vae, tmp_path / "a", sharpness=2)
    with pytest.raises(CheckpointError, match="has sharpness, which the installed diffusers'"):
        load_vae(strange)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scaling_factor": 0.5}, "says scaling_factor 0.5, but LTX-2.5 has 1.0"),
        (
            {"upsample_type": ["temporal", "spatiotemporal", "temporal", "spatial"]},
            "upsamples by 16 in space and 8 in time, but LTX-2.5 has 32 and 8",
        ),
    ],
)
def test_options_of_another_vae_are_refused(
    folders: ComponentFolders, tmp_path: Path, options: dict[str, object], told: str
) -> None:
    folder = change(folders.video_vae, tmp_path / "vae", **options)
    if "upsample_type" in options:  # the first block gets fewer channels out of its convolution
        files = load_file(folder / "diffusion_pytorch_model.safetensors")
        for kind in ("weight", "bias"):
            name = f"decoder.up_blocks.0.upsamplers.0.conv.conv.{kind}"
            files[name] = files[name][: len(files[name]) // 4].clone()
        save_file(files, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CheckpointError, match=told):
        load_vae(folder)


def test_the_vae_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLLTX2Video

    first = AutoencoderKLLTX2Video(  # three stages, as diffusers has them by default
        latent_channels=CONFIG.in_channels,
        block_out_channels=(8, 16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_block_out_channels=(8, 16, 32),
        decoder_layers_per_block=(1, 1, 1, 1),
    )
    first.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"a decoder of 3 stages, but LTX-2.5 has 4; it is"):
        load_vae(tmp_path)


def test_the_compression_is_that_of_the_blocks_not_what_the_config_claims() -> None:
    published = {
        "patch_size": 4,
        "patch_size_t": 1,
        "spatio_temporal_scaling": True,
        "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
        "spatial_compression_ratio": None,
    }
    assert compression(published, "down") == (32, 8)


def test_tensors_have_to_fit_to_the_last(folders: ComponentFolders, tmp_path: Path) -> None:
    file = "diffusion_pytorch_model.safetensors"
    good = load_file(folders.upsampler / file)
    name = "final_conv.bias"
    folder = shutil.copytree(folders.upsampler, tmp_path / "u")
    vae = load_video_vae(folders.video_vae, channels=CONFIG.in_channels, device=CPU, dtype=FP32)[0]
    without = {n: t for n, t in good.items() if n != name}
    for tensors, told in (
        (without, f"does not fit LTX2LatentUpsamplerModel: {name} is missing"),
        (good | {"more": torch.zeros(1)}, "more is left over"),
        (good | {name: torch.zeros(3)}, rf"{name} is \[3\], expected \[16\]"),
        (good | {name: good[name] * float("nan")}, f"{name} holds NaN or infinity"),
    ):
        save_file(tensors, folder / file)
        with pytest.raises(CheckpointError, match=told):
            load_upsampler(folder, vae, dtype=FP32)
    save_file(good, folder / file)
    save_file(good, folder / "variant.safetensors")
    with pytest.raises(CheckpointError, match=r"both in .* and in .*; keep one variant"):
        load_upsampler(folder, vae, dtype=FP32)


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(components.importlib, "import_module", absent)
    with pytest.raises(
        Unavailable, match=r"diffusers cannot be imported .* pip install '.\[ltx\]'"
    ):
        components.library("diffusers.pipelines.ltx2.vocoder")
