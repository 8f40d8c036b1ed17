"""What surrounds the Gemma tower on the disk: its version, its tokenizer and its projection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from runtime.checkpoints.header import CheckpointError
from runtime.ltx.components import component_config, read_tensors, tensor_files
from runtime.ltx.config import LTXConfig
from runtime.ltx.text import TextProjection

VERSION_KEY, SOURCE_KEY = "gemma_version", "gemma_source_checkpoint"
OFFICIAL = "text_embedding_projection.{0}_aggregate_embed.{1}"  # beside the tower's own tensors
DIFFUSERS = "{0}_text_proj_in.{1}"  # in the folder `connectors` beside the tower's


def folder_gemma_version(folder: Path) -> str:
    """Which fine-tuned Gemma a folder says it is, in config.json or a file's metadata; "": neither.

    CheckpointError if the metadata cannot be read.
    """
    said = str(component_config(folder).get(VERSION_KEY, ""))
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            said = said or _metadata_version(path, file.metadata() or {})
    return said


def _metadata_version(path: Path, metadata: Mapping[str, str]) -> str:
    """Plain, or inside `gemma_source_checkpoint` as in the denoiser's file."""
    if VERSION_KEY in metadata:
        return metadata[VERSION_KEY]
    try:
        return str(json.loads(metadata.get(SOURCE_KEY, "{}")).get(VERSION_KEY, ""))
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: {SOURCE_KEY} must be a JSON object ({error})") from error


def check_gemma_versions(denoiser: str, tower: str) -> str | None:
    """None if both name the same Gemma; a sentence for the user if one does not say ("").

    CheckpointError if they differ: stock Gemma 4 and other fine-tunes give other contexts.
    """
    if not denoiser and not tower:
        return "neither the denoiser nor the text encoder says which Gemma it belongs to"
    if not denoiser:
        return f"the text encoder is {tower}; the denoiser does not say which one it was made for"
    if not tower:
        return f"the text encoder does not say its version; the denoiser was made for {denoiser}"
    if denoiser != tower:
        raise CheckpointError(
            f"the denoiser was made for the text encoder {denoiser}, but this one is {tower}"
        )
    return None


def open_tokenizer(folder: Path, tokenizer: Path | None) -> Tokenizer:
    """tokenizer.json of the given folder, else of the tower's, else of `tokenizer` beside it."""
    places = [tokenizer] if tokenizer is not None else [folder, folder.parent / "tokenizer"]
    for place in places:
        path = place / "tokenizer.json"
        if path.is_file():
            try:
                words = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises its own untyped errors
                raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
            words.no_padding()
            words.no_truncation()
            return words
    told = " nor ".join(str(place) for place in places)
    raise CheckpointError(f"no tokenizer.json in {told}; give the folder of the tower's tokenizer")


def read_projection(folder: Path, config: LTXConfig, states: int) -> TextProjection:
    """On the CPU in the stored dtype, from whichever of the two places holds it whole.

    states: hidden states of the tower. CheckpointError if there is none or it does not fit.
    """
    beside = folder.parent / "connectors"
    for place, pattern in ((folder, OFFICIAL), (beside, DIFFUSERS)):
        names = {
            pattern.format(stream, kind): f"{stream}_aggregate_embed.{kind}"
            for stream in ("video", "audio")
            for kind in ("weight", "bias")
        }
        files = tensor_files(place) if place.is_dir() else {}
        if all(name in files for name in names):
            return _filled(config, states, read_tensors(files, names), place)
    first = OFFICIAL.format("video", "weight")
    raise CheckpointError(
        f"{folder} holds no {first} and {beside} no {DIFFUSERS.format('video', 'weight')}, but the "
        f"text encoder needs the projection that was trained with it"
    )


def _filled(
    config: LTXConfig, states: int, tensors: Mapping[str, Tensor], place: Path
) -> TextProjection:
    with torch.device("meta"):
        projection = TextProjection(config, states)
    for name, own in projection.state_dict().items():
        got = tensors[name]
        if got.shape != own.shape:
            raise CheckpointError(
                f"{place} has a projection {name} of {list(got.shape)}, but tower and denoiser "
                f"need {list(own.shape)}"
            )
        if not bool(torch.isfinite(got).all()):
            raise CheckpointError(f"{place}: the projection's {name} holds NaN or infinity")
    projection.load_state_dict(dict(tensors), strict=True, assign=True)
    return projection
