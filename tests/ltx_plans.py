"""Plans of family ltx over files that are the models by all but their numbers, which are zeros.

Headers and config.json are those of the tiny demo, so that preflight finds nothing; no engine can
run them.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from app import ltx_prompt
from runtime.ltx.config import LTXConfig
from runtime.ltx.folders import AUDIO_VAE, UPSAMPLER, VIDEO_VAE, VOCODER, Component
from runtime.ltx.published import TINY_CONFIG, connectors, metadata_of
from runtime.ltx.published import denoiser as published
from runtime.ltx.text_folder import CLASS_NAME, OFFICIAL
from runtime.ltx.tiny_components import TEXT_LAYERS, tiny_modules, tiny_tokenizer
from runtime.messages import ModelFiles, Plan

CONFIG = LTXConfig.from_header(metadata_of(TINY_CONFIG))
_BYTES = {"F32": 4, "BF16": 2}


def zeros(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], **metadata: str) -> Path:
    """A safetensors file of zeros: (dtype, shape) by name."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _BYTES[dtype] * prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + end)
    return path


def denoiser(path: Path, license: str | None) -> Path:
    """A tiny unquantised denoiser whose header says this of its licence."""
    metadata = metadata_of(TINY_CONFIG)
    del metadata["license"]
    specs = [*published(CONFIG, keyframes=True), *connectors(CONFIG)]
    tensors = {spec.name: (spec.dtype, tuple(spec.shape)) for spec in specs}
    return zeros(path, tensors, **metadata, **({} if license is None else {"license": license}))


def folder(path: Path, config: Mapping[str, Any], **tensors: tuple[int, ...]) -> Path:
    """A folder with this config.json and tensors of these shapes."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    zeros(path / "model.safetensors", {name: ("F32", shape) for name, shape in tensors.items()})
    return path


@functools.cache
def _parts() -> dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]]:
    """Of each class, its config and the shapes of its tensors, as the tiny demo has them."""
    with torch.device("meta"):
        modules = tiny_modules(CONFIG).values()
    made = {}
    for module in modules:
        config = module.config
        table = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        tied = getattr(module, "_tied_weights_keys", None) or ()
        shapes = {n: tuple(t.shape) for n, t in module.state_dict().items() if n not in tied}
        made[type(module).__name__] = (table, shapes)
    return made


def component(path: Path, of: Component, **options: object) -> Path:
    """A folder of one of diffusers' parts."""
    table, shapes = _parts()[of.class_name]
    return folder(path, {"_class_name": of.class_name, **table, **options}, **shapes)


def text_encoder(path: Path, **table: object) -> Path:
    """A tower with its projection and its tokenizer in one folder."""
    config, tensors = _parts()[CLASS_NAME]
    config = {**config, "architectures": [CLASS_NAME]}
    config["text_config"] = {**config["text_config"], **table}
    shapes = dict(tensors)
    for stream, width in (("video", CONFIG.video_dim), ("audio", CONFIG.audio_dim)):
        shapes[OFFICIAL.format(stream, "weight")] = (
            width,
            CONFIG.caption_channels * (TEXT_LAYERS + 1),
        )
        shapes[OFFICIAL.format(stream, "bias")] = (width,)
    folder(path, config, **shapes)
    (path / "tokenizer.json").write_text(tiny_tokenizer())
    return path


def plan_of(place: Path, license: str | None = "LTX-2.x Community License") -> Plan:
    """A plan in whose files preflight finds no fault, and whose denoiser has this licence."""
    place.mkdir(parents=True, exist_ok=True)
    models = ModelFiles(
        dit=denoiser(place / "dit.safetensors", license),
        text_encoder=text_encoder(place / "text_encoder"),
        video_vae=component(place / "video_vae", VIDEO_VAE),
        audio_vae=component(place / "audio_vae", AUDIO_VAE),
        vocoder=component(place / "vocoder", VOCODER),
        upsampler=component(place / "upsampler", UPSAMPLER),
    )
    return Plan(
        name="mine",
        models=models,
        family="ltx",
        device="cpu",
        dtype="fp32",
        video_vae_dtype="fp32",
        threads=1,
    )


def counted_children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of the children that ltx_prompt starts from now on; they answer as they do."""
    started: list[str] = []
    run = ltx_prompt.run_child

    def counted(module: str, **options: Any) -> str:
        started.append(module)
        return run(module, **options)

    monkeypatch.setattr(ltx_prompt, "run_child", counted)
    return started
