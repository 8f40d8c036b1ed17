"""The folder of the Gemma tower without torch: class, version, tokenizer, where its projection is.

Also the tokens of a prompt, which preflight counts as the tower does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.checkpoints.header import CheckpointError, read_header
from runtime.ltx.config import LTXConfig
from runtime.ltx.folders import (
    component_config,
    component_folder,
    shapes_of,
    tensor_files,
    weight_files,
)
from runtime.ltx.sizes import CONTEXT_ROWS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PART = "text encoder"
CLASS_NAME = "Gemma4UnifiedForConditionalGeneration"
VERSION_KEY, SOURCE_KEY = "gemma_version", "gemma_source_checkpoint"
OFFICIAL = "text_embedding_projection.{0}_aggregate_embed.{1}"  # beside the tower's own tensors
DIFFUSERS = "{0}_text_proj_in.{1}"  # in the folder `connectors` beside the tower's
INDEX = "model.safetensors.index.json"
_IDS = ("bos_token_id", "pad_token_id")
_BOS = 2  # transformers' default of Gemma 4, for a config.json that does not say it


def check_text_folder(
    folder: Path, tokenizer: Path | None, config: LTXConfig, gemma_version: str
) -> None:
    """CheckpointError for what load_text_tower would refuse, as far as no tensor has to be read.

    config, gemma_version: of the denoiser. tokenizer: as open_tokenizer takes it.
    """
    table = tower_config(folder).get("text_config")
    if not isinstance(table, dict):
        raise CheckpointError(f"{folder} says nothing of its text model (text_config)")
    check_table(folder, table, config)
    tower_files(folder)
    tokenizer_file(folder, tokenizer)
    check_gemma_versions(gemma_version, folder_gemma_version(folder))
    files, names, place = projection_files(folder)
    layers = table.get("num_hidden_layers")
    if isinstance(layers, int):
        wanted = projection_shapes(config, layers + 1)
        for stored, got in shapes_of(files, names).items():
            check_projection(place, names[stored], got, wanted[names[stored]])


def tower_config(folder: Path) -> dict[str, Any]:
    """config.json of a tower; CheckpointError for a folder of another class."""
    table = component_config(component_folder(folder, PART))
    said = table.get("architectures") or []
    kinds = said if isinstance(said, list) else [said]
    if CLASS_NAME not in kinds:
        told = ", ".join(map(str, kinds))
        raise CheckpointError(
            f"{folder} is of class {told or table.get('_class_name') or 'unknown'}, but the {PART} "
            f"of LTX-2.5 is a {CLASS_NAME}"
        )
    return table


def tower_files(folder: Path) -> set[Path]:
    """Those that transformers reads: model.safetensors, without it those that the index names.

    Others may lie beside them, as with the projection. CheckpointError where it would read none.
    """
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors"}
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            f"{folder} has no model.safetensors and no {INDEX}, so transformers finds no weights "
            f"of the {PART} in it"
        )
    try:
        named = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        files = {folder / name for name in named}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read as an index: {error}") from error
    for path in sorted(files - set(weight_files(folder))):
        raise CheckpointError(f"{folder / INDEX} names {path.name}, which is not there")
    return files


def check_table(folder: Path, table: Mapping[str, Any], config: LTXConfig) -> None:
    """What the text part of the config says, against the denoiser's."""
    hidden = table.get("hidden_size", config.caption_channels)
    if hidden != config.caption_channels:
        raise CheckpointError(
            f"{folder} has hidden states of {hidden} channels, but the denoiser was made for "
            f"{config.caption_channels}"
        )
    for name in _IDS:
        if name in table and type(table[name]) is not int:
            raise CheckpointError(f"{folder} must name one {name}, got {table[name]!r}")


def folder_gemma_version(folder: Path) -> str:
    """Which fine-tuned Gemma a folder says it is, in config.json or a file's metadata; "": neither.

    CheckpointError if the metadata cannot be read.
    """
    said = str(component_config(folder).get(VERSION_KEY) or "")  # null says nothing
    for path in weight_files(folder):
        said = said or _metadata_version(path, read_header(path).metadata)
    return said


def _metadata_version(path: Path, metadata: Mapping[str, str]) -> str:
    """Plain, or inside `gemma_source_checkpoint` as in the denoiser's file."""
    if VERSION_KEY in metadata:
        return metadata[VERSION_KEY]
    try:
        return str(json.loads(metadata.get(SOURCE_KEY, "{}")).get(VERSION_KEY) or "")
    except (ValueError, AttributeError, RecursionError) as error:
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


def tokenizer_file(folder: Path, tokenizer: Path | None) -> Path:
    """tokenizer.json of the given folder, else of the tower's, else of `tokenizer` beside it."""
    places = [tokenizer] if tokenizer is not None else [folder, folder.parent / "tokenizer"]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place / "tokenizer.json"
    told = " nor ".join(str(place) for place in places)
    raise CheckpointError(f"no tokenizer.json in {told}; give the folder of the tower's tokenizer")


def open_tokenizer(folder: Path, tokenizer: Path | None) -> Tokenizer:
    """The tokenizer of tokenizer_file, which neither pads nor cuts."""
    from tokenizers import Tokenizer  # not in the console's process, which only looks at folders

    path = tokenizer_file(folder, tokenizer)
    try:
        words = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises its own untyped errors
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    words.no_padding()
    words.no_truncation()
    return words


def bos_of(folder: Path) -> int:
    """The id that every prompt begins with."""
    return int(tower_config(folder)["text_config"].get("bos_token_id", _BOS))


def prompt_ids(words: Tokenizer, bos: int, prompt: str) -> list[int]:
    """Ids of the stripped prompt behind one BOS, which the tokenizer may not add itself."""
    ids: list[int] = words.encode(prompt.strip()).ids
    return ids if ids[:1] == [bos] else [bos, *ids]


def check_tokens(count: int) -> None:
    """ValueError for more than 1,024."""
    if count > CONTEXT_ROWS:
        raise ValueError(f"the prompt has {count} tokens, at most {CONTEXT_ROWS} fit; shorten it")


def projection_files(folder: Path) -> tuple[dict[str, Path], dict[str, str], Path]:
    """(files by tensor, own names by stored ones, folder) of whichever place holds it whole."""
    beside = folder.parent / "connectors"
    for place, pattern in ((folder, OFFICIAL), (beside, DIFFUSERS)):
        names = {
            pattern.format(stream, kind): f"{stream}_aggregate_embed.{kind}"
            for stream in ("video", "audio")
            for kind in ("weight", "bias")
        }
        files = tensor_files(place) if place.is_dir() else {}
        if all(name in files for name in names):
            return files, names, place
    first = OFFICIAL.format("video", "weight")
    raise CheckpointError(
        f"{folder} holds no {first} and {beside} no {DIFFUSERS.format('video', 'weight')}, but the "
        f"{PART} needs the projection that was trained with it"
    )


def projection_shapes(config: LTXConfig, states: int) -> dict[str, tuple[int, ...]]:
    """Of the four tensors; states: hidden states of the tower."""
    streams = {"video": config.video_dim, "audio": config.audio_dim}
    shapes: dict[str, tuple[int, ...]] = {}
    for stream, width in streams.items():
        shapes[f"{stream}_aggregate_embed.weight"] = (width, config.caption_channels * states)
        shapes[f"{stream}_aggregate_embed.bias"] = (width,)
    return shapes


def check_projection(place: Path, name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """CheckpointError for a projection that fits neither tower nor denoiser."""
    if got != wanted:
        raise CheckpointError(
            f"{place} has a projection {name} of {list(got)}, but tower and denoiser need "
            f"{list(wanted)}"
        )
