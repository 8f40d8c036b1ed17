"""The published checkpoint files and their tiny twins: which layout each format has (no torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from runtime.checkpoints.layouts import (
    FP8,
    INT8,
    NVFP4,
    NVFP4_FULL_PRECISION,
    TINY_AUDIO_VAE,
    TINY_DIT,
    TINY_TEXT,
    TINY_VIDEO_VAE,
    AudioVaeDims,
    DitDims,
    Layout,
    Recipe,
    TensorSpec,
    TextDims,
    VideoVaeDims,
    audio_vae,
    convrot,
    dit,
    layout,
    quantised,
    text_encoder,
    video_vae,
)

# The first is the default. Full-size fp8_scaled is not known exactly (checkpoints.md A2).
FORMATS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "full": {
        "dit": ("pruned_nvfp4", "pruned_bf16", "pruned_int8", "full_bf16"),
        "text_encoder": ("nvfp4_awq", "bf16"),
        "video_vae": ("fp16", "int8_convrot"),
        "audio_vae": ("fp32",),
    },
    "tiny": {
        "dit": ("pruned_nvfp4", "pruned_bf16", "pruned_int8", "full_bf16", "full_fp8"),
        "text_encoder": ("nvfp4_awq", "bf16"),
        "video_vae": ("fp16", "int8_convrot"),
        "audio_vae": ("fp32",),
    },
}
_TORCH_METADATA = {"format": "pt"}


def published(role: str, *, size: str, format: str) -> Layout:
    """The layout of one file. size: full | tiny; format: one of FORMATS[size][role]."""
    if size not in FORMATS:
        raise ValueError(f"size must be full or tiny, got {size!r}")
    if role not in FORMATS[size]:
        raise ValueError(f"role must be one of {', '.join(FORMATS[size])}, got {role!r}")
    if format not in FORMATS[size][role]:
        raise ValueError(
            f"the {size} {role} comes as {', '.join(FORMATS[size][role])}, got {format!r}"
        )
    full = size == "full"
    if role == "dit":
        return _dit(format, full)
    if role == "text_encoder":
        return _text_encoder(format, full)
    if role == "video_vae":
        return _video_vae(format, full)
    return layout(audio_vae(AudioVaeDims() if full else TINY_AUDIO_VAE), _TORCH_METADATA)


def _dit(format: str, full: bool) -> Layout:
    pruned = format.startswith("pruned")
    quantising = {"pruned_nvfp4": NVFP4, "full_fp8": FP8, "pruned_int8": INT8}.get(format)
    if not pruned:
        adaln = "BF16"
    elif full:
        adaln = "F16" if quantising else "BF16"
    else:
        adaln = "F32"
    specs = list(dit(DitDims() if full else TINY_DIT, pruned=pruned, adaln=adaln))
    # Published quantised DiTs carry no metadata at all; the tiny ones do.
    metadata = {} if full and quantising else _TORCH_METADATA
    if quantising is None:
        return layout(specs, metadata)
    layers: list[str] = []

    def choose(layer: str, shape: tuple[int, ...]) -> Recipe | None:
        block = layer.startswith("blocks.") or (not full and "refiner.blocks." in layer)
        if not block or "adaln_proj" in layer:
            return None
        layers.append(layer)
        if quantising == INT8:
            return Recipe(marker=convrot(shape[1]))
        return Recipe(marker=quantising, in_header=quantising == FP8)

    tensors = list(quantised(specs, choose))
    if quantising == FP8:
        metadata = {**metadata, "_quantization_metadata": _header_markers(layers)}
    return layout(tensors, metadata)


def _header_markers(layers: list[str]) -> str:
    ordered = sorted(layers, key=lambda name: name.startswith("token_refiner"))
    markers = {layer: json.loads(FP8) for layer in ordered}
    return json.dumps({"format_version": "1.0", "layers": markers})


def _text_encoder(format: str, full: bool) -> Layout:
    specs = text_encoder(TextDims() if full else TINY_TEXT)
    if format == "bf16":
        return layout(specs, _TORCH_METADATA)

    def choose(layer: str, shape: tuple[int, ...]) -> Recipe | None:
        if layer == "model.embed_tokens":
            return Recipe(marker=INT8 if full else FP8)
        if not layer.startswith("model.layers."):
            return None
        awq = layer.endswith(("o_proj", "down_proj"))
        return Recipe(marker=NVFP4_FULL_PRECISION if full else NVFP4, pre_quant_scale=awq)

    return layout(quantised(specs, choose), {} if full else _TORCH_METADATA)


def _video_vae(format: str, full: bool) -> Layout:
    specs: list[TensorSpec] = list(video_vae(VideoVaeDims() if full else TINY_VIDEO_VAE))
    if format == "fp16":
        return layout(specs, _TORCH_METADATA)

    def choose(layer: str, shape: tuple[int, ...]) -> Recipe | None:
        inside = layer.startswith("decoder.transformer_blocks.")
        return Recipe(marker=convrot(shape[1])) if inside else None

    return layout(quantised(specs, choose), _TORCH_METADATA)
