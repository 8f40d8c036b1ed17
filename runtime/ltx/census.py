"""What the header of an LTX denoiser file promises, against what it holds (ltx25.md 1, 12).

Free of torch: nothing but the header (and markers of a few bytes) is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from runtime.checkpoints.header import CheckpointError, Header
from runtime.checkpoints.index import MARKER, Index, ReadBytes, build_index
from runtime.checkpoints.layouts import TensorSpec
from runtime.ltx.config import LTXConfig, check_version
from runtime.ltx.published import (
    CONFIG,
    CONNECTORS,
    KEYFRAMES,
    PACKED_BLOCKS,
    connectors,
    denoiser,
    metadata_of,
    packable,
)

ROLE = "ltx_dit"  # of runtime/checkpoints/roles.py
FORMAT = "nvfp4"
METADATA_KEY = "_quantization_metadata"
Markers = Literal["none", "header", "tensors", "header and tensors"]
_FLOATS = ("F32", "BF16", "F16")
_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """One denoiser file by its header; it can be loaded when `problems` is empty."""

    index: Index  # names without prefix; index.layers: the quantised ones
    config: LTXConfig
    version: str  # model_version
    license: str | None  # the whole text or a name, None: the header has no such key
    gemma_version: str  # of the text tower that it was trained with; "": not said
    markers: Markers
    keyframes: bool  # keyframes_abs_pos_embedding is there; absent it counts as zeros
    connectors: bool  # those of the text conditioning are in the file
    problems: tuple[str, ...]  # what the file lacks, has too much or in another shape
    unlike_published: tuple[str, ...]  # stored in another float type than the published files

    @property
    def header(self) -> Header:
        return self.index.header

    @property
    def packed_blocks(self) -> int:
        """Blocks that have a quantised layer."""
        return len({layer.split(".")[1] for layer in self.index.layers if "." in layer})

    @property
    def official(self) -> bool:
        """Is it tensor for tensor the published NVFP4 file (with or without keyframes)?

        Only of such a file is the order of nibbles and scales known without markers (12.6).
        """
        wanted = {
            name
            for name in _linears(self.config)
            if packable(name) and int(name.split(".")[1]) < PACKED_BLOCKS
        }
        return (
            self.config == LTXConfig.from_header(metadata_of(CONFIG))
            and self.index.layers.keys() == wanted
            and self.connectors
            and not self.problems
            and not self.unlike_published
        )

    def check(self) -> None:
        """CheckpointError that lists the problems, if there are any."""
        if self.problems:
            raise CheckpointError(f"{self.header.path}: {'; '.join(self.problems)}")

    def check_connectors(self) -> None:
        """CheckpointError for a file that cannot make a context of a prompt."""
        if not self.connectors:
            raise CheckpointError(
                f"{self.header.path} has no connectors ({', '.join(CONNECTORS)}), so it makes no "
                f"context of a prompt; use a file that has them"
            )


def read_census(header: Header, read: ReadBytes | None = None) -> Census:
    """read: gives the bytes of a small tensor; None reads them from the file.

    CheckpointError, naming the file, when it is no LTX denoiser, has no config or one that cannot
    be run, is of another version, or has markers that contradict each other.
    """
    index = build_index(header, ROLE, read)  # first: a file of another model has no such header
    try:
        config = LTXConfig.from_header(header.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{header.path}: {error}") from error
    names = index.tensors.keys()
    _check_counts(config, header)
    in_file = any(name.startswith(CONNECTORS) for name in names)
    keyframes = KEYFRAMES in names
    wanted = [*denoiser(config, keyframes=keyframes), *(connectors(config) if in_file else ())]
    markers = _marker_kind(header)
    if markers == "header and tensors":
        _refuse_conflicts(header, index, read)
    return Census(
        index=index,
        config=config,
        version=check_version(header.metadata),
        license=header.metadata.get("license"),
        gemma_version=_gemma_version(header),
        markers=markers,
        keyframes=keyframes,
        connectors=in_file,
        problems=tuple(_problems(index, wanted)),
        unlike_published=tuple(
            f"{spec.name} is {index.tensors[spec.name].dtype}, published as {spec.dtype}"
            for spec in wanted
            if spec.name in names and _layer(spec.name) not in index.layers
            if index.tensors[spec.name].dtype in _FLOATS
            and index.tensors[spec.name].dtype != spec.dtype
        ),
    )


def _check_counts(config: LTXConfig, header: Header) -> None:
    """A damaged count would list tensors of blocks without end."""
    for name in ("num_layers", "connector_num_layers"):
        count = getattr(config, name)
        if count > len(header.tensors):
            raise CheckpointError(
                f"{header.path}: the header's config has {name} {count}, and the file has only "
                f"{len(header.tensors)} tensors"
            )


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _linears(config: LTXConfig) -> Iterable[str]:
    return (_layer(spec.name) for spec in denoiser(config, keyframes=False))


def _problems(index: Index, wanted: Iterable[TensorSpec]) -> Iterable[str]:
    """Missing, left over, of another shape, of a type that is no weight, without its scale."""
    specs = {spec.name: spec for spec in wanted}
    packed = {
        f"{layer}.{suffix}"
        for layer in index.layers
        for suffix in index.suffixes(layer)
        if suffix != "bias"  # some linears have none
    }
    yield from _listed("missing", (name for name in specs if name not in index.tensors))
    extra = (name for name in index.tensors if name not in specs and name not in packed)
    yield from _listed("unexpected", extra)
    yield from _listed("misshapen", _misshapen(index, specs))
    yield from _listed("not floating-point and without a marker", _unmarked(index, specs))
    foreign = [f"{n} ({q.format})" for n, q in index.layers.items() if q.format != FORMAT]
    yield from _listed(f"not {FORMAT}, the only quantisation read here", foreign, "layers")
    strange = [layer for layer in index.layers if f"{layer}.weight" not in specs]
    yield from _listed("quantised that the model does not have", strange, "layers")
    unscaled = [n for n in index.layers if f"{n}.input_scale" not in index.tensors]
    yield from _listed("without input_scale, which W4A4 needs", unscaled, "layers")
    awq = [n for n in index.layers if f"{n}.pre_quant_scale" in index.tensors]
    yield from _listed("with a pre_quant_scale, which no LTX file has", awq, "layers")


def _misshapen(index: Index, specs: Mapping[str, TensorSpec]) -> Iterable[str]:
    for name, spec in specs.items():
        if name not in index.tensors:
            continue
        layer, _, suffix = name.rpartition(".")
        packed = suffix == "weight" and layer in index.shapes
        got = index.shapes[layer] if packed else index.tensors[name].shape
        if got != spec.shape:
            yield f"{name} {list(got)}, the config asks for {list(spec.shape)}"


def _unmarked(index: Index, specs: Mapping[str, TensorSpec]) -> Iterable[str]:
    for name in specs:
        info = index.tensors.get(name)
        packed = name.endswith(".weight") and _layer(name) in index.layers
        if info is not None and not packed and info.dtype not in _FLOATS:
            yield f"{name} ({info.dtype})"


def _listed(word: str, names: Iterable[str], things: str = "tensors") -> list[str]:
    found = sorted(names)
    if not found:
        return []
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return [f"{len(found)} {things} {word}: {', '.join(found[:_LISTED])}{more}"]


def _marker_kind(header: Header) -> Markers:
    in_header = METADATA_KEY in header.metadata
    if any(name.endswith(f".{MARKER}") for name in header.tensors):
        return "header and tensors" if in_header else "tensors"
    return "header" if in_header else "none"


def _refuse_conflicts(header: Header, index: Index, read: ReadBytes | None) -> None:
    """Both kinds of markers must say the same; `index` has the tensors' word where they do not."""
    tensors = {n: i for n, i in header.tensors.items() if not n.endswith(f".{MARKER}")}
    alone = Header(
        path=header.path,
        tensors=tensors,
        metadata=header.metadata,
        header_bytes=header.header_bytes,
        file_bytes=header.file_bytes,
    )
    said = build_index(alone, ROLE, read).layers
    other = sorted(
        n for n in said.keys() | index.layers.keys() if said.get(n) != index.layers.get(n)
    )
    if other:
        raise CheckpointError(
            f"{header.path}: the header's {METADATA_KEY} and the {MARKER} tensors contradict each "
            f"other for {len(other)} layers, first {other[0]}; use a file with one of the two"
        )


def _gemma_version(header: Header) -> str:
    text = header.metadata.get("gemma_source_checkpoint")
    if text is None:
        return ""
    try:
        found = json.loads(text)
        said, gemma = str(found.get("ltx_version", "")), str(found["gemma_version"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{header.path}: gemma_source_checkpoint must be a JSON object with gemma_version, "
            f"got {text:.60}"
        ) from error
    version = check_version(header.metadata)
    if said and said.split(".")[:2] != version.split(".")[:2]:
        raise CheckpointError(
            f"{header.path}: model_version is {version} and gemma_source_checkpoint says "
            f"ltx_version {said:.20}; the two must be of one release"
        )
    return gemma
