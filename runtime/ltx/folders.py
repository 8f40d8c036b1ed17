"""Folders of the parts around the LTX denoiser, by config.json and headers alone, without torch.

Loaders and preflight ask the same: what config.json leaves out has its class's default, which only
a loader can look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from runtime.checkpoints.header import CheckpointError, read_header
from runtime.ltx.sizes import (
    AUDIO_BINS,
    AUDIO_CHANNELS,
    FRAMES_PER_LATENT,
    PIXELS_PER_LATENT,
)

CONFIG = "config.json"
DIFFUSION_DECODER_KEY = "conv_in_x_t.weight"  # of Lightricks' file and of diffusers' module
SAMPLE_RATE = 48_000  # Hz that the vocoder puts out
MEL_RATE = 16_000  # Hz of the wave whose mel spectrogram the audio VAE decodes
MEL_HOP = 160
MEL_BINS = 64
CHANNELS = 2  # of the sound
UP_STAGES = 4  # of the video VAE's decoder; LTX-2's first one has three over the same compression
LATENTS_MEAN, LATENTS_STD = "latents_mean", "latents_std"
_STAGES = ("patch_size", "patch_size_t", "upsample_type", "downsample_type")
_SCALED = {"down": "spatio_temporal_scaling", "up": "decoder_spatio_temporal_scaling"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part that diffusers computes.

    part: what it is called. options: of its config, those that have one value in LTX-2.5.
    """

    part: str
    class_name: str
    module: str = "diffusers"
    options: Mapping[str, Any] = field(default_factory=dict)


VIDEO_VAE = Component(
    part="video VAE",
    class_name="AutoencoderKLLTX2Video",
    options={"timestep_conditioning": False, "scaling_factor": 1.0},
)
AUDIO_VAE = Component(
    part="audio VAE",
    class_name="AutoencoderKLLTX2Audio",
    options={
        "latent_channels": AUDIO_CHANNELS,
        "output_channels": CHANNELS,
        "sample_rate": MEL_RATE,
        "mel_hop_length": MEL_HOP,
        "mel_bins": MEL_BINS,
        "is_causal": True,
    },
)
VOCODER = Component(
    part="vocoder",
    class_name="LTX2VocoderWithBWE",  # with bandwidth extension to 48 kHz
    module="diffusers.pipelines.ltx2.vocoder",
    options={
        "in_channels": CHANNELS * MEL_BINS,
        "out_channels": CHANNELS,
        "input_sampling_rate": MEL_RATE,
        "output_sampling_rate": SAMPLE_RATE,
    },
)
UPSAMPLER = Component(
    part="latent upsampler",
    class_name="LTX2LatentUpsamplerModel",
    module="diffusers.pipelines.ltx2.latent_upsampler",
    options={"dims": 3, "spatial_upsample": True, "temporal_upsample": False},
)

OF_ROLE: Mapping[str, Component] = {
    "video_vae": VIDEO_VAE,
    "audio_vae": AUDIO_VAE,
    "vocoder": VOCODER,
    "upsampler": UPSAMPLER,
}


def component_folder(path: Path, part: str) -> Path:
    """`path` if it is a folder with a config.json; CheckpointError naming the part otherwise."""
    wanted = f"a local folder with {CONFIG} and safetensors, as diffusers and transformers write it"
    if path.is_file():
        _refuse_diffusion_decoder(path, read_header(path).tensors)
    if not path.is_dir():
        kind = "a file" if path.is_file() else "no existing folder"
        raise CheckpointError(f"{path} is {kind}, but the {part} is given as {wanted}")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} holds no {CONFIG}, but the {part} is given as {wanted}")
    return path


def component_config(folder: Path) -> dict[str, Any]:
    """What config.json says; CheckpointError if it is no JSON object."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:  # also what is no UTF-8
        raise CheckpointError(f"{folder / CONFIG} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} must hold an object, got {type(config).__name__}")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; OSError where glob would say that there are none."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file of the folder holds which tensor; each name in one file only."""
    found: dict[str, Path] = {}
    for path in weight_files(folder):
        for name in read_header(path).tensors:
            if name in found:
                raise CheckpointError(
                    f"{folder} holds {name} both in {found[name].name} and in {path.name}; "
                    f"keep one variant of the weights"
                )
            found[name] = path
    if not found:
        raise CheckpointError(f"{folder} holds no tensors in any *.safetensors file")
    return found


def shapes_of(files: Mapping[str, Path], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Of these tensors of `files` (tensor_files), each file's header read once."""
    places = {name: files[name] for name in names}
    headers = {path: read_header(path) for path in set(places.values())}
    return {name: headers[path].tensors[name].shape for name, path in places.items()}


def check_component(
    path: Path, component: Component
) -> tuple[Path, dict[str, Any], dict[str, Path]]:
    """Folder, config and tensors of a part of the right class; CheckpointError otherwise."""
    folder = component_folder(path, component.part)
    files = tensor_files(folder)
    _refuse_diffusion_decoder(folder, files)
    config = component_config(folder)
    given = config.get("_class_name")
    if given != component.class_name:
        raise CheckpointError(
            f"{folder / CONFIG} is of class {given!r}, but the {component.part} must be a "
            f"{component.class_name}"
        )
    return folder, config, files


def check_options(
    folder: Path, component: Component, config: Mapping[str, Any], **more: object
) -> None:
    """CheckpointError unless what the config says is what is implemented; more: further options."""
    for name, allowed in {**component.options, **more}.items():
        if name in config and config[name] != allowed:
            raise CheckpointError(
                f"{folder / CONFIG} of the {component.part} says {name} {config[name]!r}, but "
                f"LTX-2.5 has {allowed!r}"
            )


def check_video_vae(folder: Path, config: Mapping[str, Any], channels: int) -> None:
    """Options, stages and compression; `channels` are the denoiser's."""
    check_options(folder, VIDEO_VAE, config, latent_channels=channels)
    if any(name not in config for name in (*_STAGES, *_SCALED.values())):
        return  # left to the class's defaults
    try:
        stages = len(config["upsample_type"])
        made = {side: compression(config, side) for side in _SCALED}
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} of the video VAE has stages that do not fit together: {error}"
        ) from error
    if stages != UP_STAGES:
        raise CheckpointError(
            f"{folder} has a decoder of {stages} stages, but LTX-2.5 has {UP_STAGES}; it is the "
            f"VAE of another version"
        )
    for side, found in made.items():
        if found != (PIXELS_PER_LATENT, FRAMES_PER_LATENT):
            raise CheckpointError(
                f"{folder} {side}samples by {found[0]} in space and {found[1]} in time, but "
                f"LTX-2.5 has {PIXELS_PER_LATENT} and {FRAMES_PER_LATENT}"
            )


def compression(config: Mapping[str, Any], side: str) -> tuple[int, int]:
    """Pixels and frames per latent that the blocks of one side ("down", "up") really make.

    The config's own two ratios are not asked: where they are absent diffusers guesses wrong.
    """
    scaled = config[_SCALED[side]]
    kinds: Sequence[str] = config[f"{side}sample_type"]
    flags = [scaled] * len(kinds) if isinstance(scaled, bool) else list(scaled)
    used = [kind for kind, flag in zip(kinds, flags, strict=True) if flag]
    space = sum(kind in ("spatial", "spatiotemporal") for kind in used)
    time = sum(kind in ("temporal", "spatiotemporal") for kind in used)
    return config["patch_size"] * 2**space, config["patch_size_t"] * 2**time


def check_audio_vae(folder: Path, config: Mapping[str, Any], statistics: int) -> None:
    """Options, and one of the statistics for each channel of a packed token."""
    check_options(folder, AUDIO_VAE, config)
    packed = AUDIO_CHANNELS * AUDIO_BINS
    if statistics != packed:
        raise CheckpointError(
            f"{folder} has {statistics} statistics of the latents, but a packed audio token has "
            f"{packed} channels"
        )


def check_role(role: str, path: Path, channels: int) -> None:
    """The folder of a role of [models], the text encoder aside; CheckpointError as a loader has it.

    channels: of the denoiser's video latents.
    """
    folder, config, files = check_component(path, OF_ROLE[role])
    if role == "video_vae":
        check_video_vae(folder, config, channels)
    elif role == "audio_vae":
        if LATENTS_MEAN not in files:
            raise CheckpointError(f"{folder} does not fit the audio VAE: {LATENTS_MEAN} is missing")
        check_audio_vae(folder, config, prod(shapes_of(files, [LATENTS_MEAN])[LATENTS_MEAN]))
    elif role == "upsampler":
        check_upsampler(folder, config, channels)
    else:
        check_options(folder, VOCODER, config)


def check_upsampler(folder: Path, config: Mapping[str, Any], channels: int) -> None:
    """Options of the one that doubles height and width; `channels` are the denoiser's."""
    scale = {"rational_spatial_scale": 2.0} if config.get("use_rational_resampler") else {}
    check_options(folder, UPSAMPLER, config, in_channels=channels, **scale)


def _refuse_diffusion_decoder(path: Path, names: Mapping[str, object]) -> None:
    if any(name.endswith(DIFFUSION_DECODER_KEY) for name in names):
        raise CheckpointError(
            f"{path} is the diffusion decoder (it holds {DIFFUSION_DECODER_KEY}), which is not "
            f"implemented; give the folder of the convolutional video VAE"
        )
