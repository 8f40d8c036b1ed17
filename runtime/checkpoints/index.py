"""The checked table of contents of a checkpoint: prefix off, markers parsed (no torch)."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.checkpoints import FORMATS
from runtime.checkpoints.header import CheckpointError, Header, TensorInfo, read_bytes
from runtime.checkpoints.layer import Format, LayerQuant, LayerTensors
from runtime.checkpoints.roles import ROLES, own_names

MARKER = "comfy_quant"
LEGACY = "scaled_fp8"
_METADATA = "_quantization_metadata"
_LEGACY_SUFFIX = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
_LEGACY_FORMAT = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_MARKER_KEYS = frozenset({"format", "full_precision_matrix_mult"})
_MAX_MARKER_BYTES = 4096
ReadBytes = Callable[[TensorInfo], bytes]
_ONE = struct.pack("<f", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Tensor names without prefix and markers; quantised layers with their logical [N, K]."""

    header: Header
    tensors: Mapping[str, TensorInfo]
    layers: Mapping[str, LayerQuant]
    shapes: Mapping[str, tuple[int, int]]

    def suffixes(self, layer: str) -> tuple[str, ...]:
        """Suffixes of the stored tensors of a quantised layer."""
        wanted = FORMATS[self.layers[layer].format].suffixes
        return tuple(suffix for suffix in wanted if f"{layer}.{suffix}" in self.tensors)


def build_index(header: Header, role: str, read: ReadBytes | None = None) -> Index:
    """Strip the role's prefix, read the markers (a few bytes each) and check every quantised layer.

    read: gives the bytes of a small tensor; None reads them from the file.

    Raises CheckpointError naming format and layer for anything that cannot be decoded (contract 8).
    """
    names = own_names(header.tensors.keys(), role, header.path)
    tensors = {name: header.tensors[stored] for name, stored in names.items()}
    try:
        _refuse_foreign_layouts(header.metadata, tensors)
        read = read or partial(read_bytes, header)
        markers = _markers(header, read, tensors, prefixes=_prefixes(names))
        if LEGACY in tensors and not markers:
            tensors, markers = _from_legacy(read, tensors)
        if not markers and _METADATA not in header.metadata:
            markers = _unmarked(tensors, ROLES[role].unmarked)
        tensors = {n: i for n, i in tensors.items() if n.rpartition(".")[2] != MARKER}
        layers = {layer: _layer_quant(layer, marker) for layer, marker in markers.items()}
        _refuse_rotated_nvfp4(header.metadata, layers)
        shapes = _check_layers(tensors, layers)
    except CheckpointError as error:
        raise CheckpointError(f"{header.path}: {error}") from error
    return Index(header=header, tensors=tensors, layers=layers, shapes=shapes)


def _prefixes(names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple({stored[: -len(name)] for name, stored in names.items() if stored != name})


def _markers(
    header: Header, read: ReadBytes, tensors: Mapping[str, TensorInfo], prefixes: Iterable[str]
) -> dict[str, Any]:
    """Layer -> marker: `.comfy_quant` tensors, else the header's `_quantization_metadata`."""
    markers = _from_metadata(header.metadata, prefixes)
    for name, info in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if suffix != MARKER:
            continue
        if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > _MAX_MARKER_BYTES:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}; a marker is a U8 vector of JSON text"
            )
        markers[layer] = _json(f"marker of layer {layer}", read(info))
    return markers


def _from_metadata(metadata: Mapping[str, str], prefixes: Iterable[str]) -> dict[str, Any]:
    text = metadata.get(_METADATA)
    if text is None:
        return {}
    found = _json("_quantization_metadata", text.encode())
    version = str(found.get("format_version", "1.0"))
    if version.split(".")[0] != "1":
        raise CheckpointError(f"_quantization_metadata has version {version}; supported: 1.x")
    layers = found.get("layers")
    if not isinstance(layers, dict):
        raise CheckpointError("_quantization_metadata has no 'layers'")
    markers: dict[str, Any] = {}
    for name, marker in layers.items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        layer = name[len(prefix) :]
        if markers.setdefault(layer, marker) != marker:
            raise CheckpointError(
                f"{_METADATA} names layer {layer} twice, with and without prefix, as "
                f"{markers[layer]} and as {marker}"
            )
    return markers


def _from_legacy(
    read: ReadBytes, tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """`scaled_fp8` files: rename the scales, drop input scales of exactly 1, add markers."""
    full_precision = tensors[LEGACY].numel == 2
    renamed: dict[str, TensorInfo] = {}
    markers: dict[str, Any] = {}
    for name, info in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if name == LEGACY:
            continue
        if suffix == "scale_input" and info.dtype == "F32" and read(info) == _ONE:
            continue
        renamed[f"{layer}.{_LEGACY_SUFFIX[suffix]}" if suffix in _LEGACY_SUFFIX else name] = info
        if suffix == "scale_weight":
            weight = tensors.get(f"{layer}.weight")
            stored = weight.dtype if weight else "nothing"
            if stored not in _LEGACY_FORMAT:
                raise CheckpointError(f"{name} scales {stored}; a scaled_fp8 weight is F8_E4M3")
            markers[layer] = {
                "format": _LEGACY_FORMAT[stored],
                "full_precision_matrix_mult": full_precision,
            }
    return renamed, markers


def _unmarked(tensors: Mapping[str, TensorInfo], format: str) -> dict[str, Any]:
    """The layers of a file without markers that store a second scale, where its role packs so."""
    if not format:
        return {}
    ending = ".weight_scale_2"
    return {n.removesuffix(ending): {"format": format} for n in tensors if n.endswith(ending)}


def _json(what: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise CheckpointError(f"{what} is not JSON: {text[:60]!r}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is not a JSON object: {text[:60]!r}")
    return found


def _layer_quant(layer: str, marker: Any) -> LayerQuant:
    if not isinstance(marker, dict) or not isinstance(marker.get("format"), str):
        raise CheckpointError(f"the marker of layer {layer} names no format: {marker!s:.80}")
    name = marker["format"]
    if name not in FORMATS:
        raise CheckpointError(
            f"layer {layer} is quantised as {name!r}, which is not supported; "
            f"supported: {', '.join(FORMATS)}"
        )
    unknown = sorted(set(marker) - _MARKER_KEYS - FORMATS[name].options)
    if unknown:
        rotated = "rotated " if any("rot" in key for key in unknown) else ""
        raise CheckpointError(
            f"layer {layer} is {rotated}{name} with the marker option {unknown[0]!r}, "
            f"which is not supported for {name}"
        )
    full_precision = marker.get("full_precision_matrix_mult", False)
    if not isinstance(full_precision, bool):
        raise CheckpointError(
            f"layer {layer}: full_precision_matrix_mult must be true or false, "
            f"got {full_precision!r}"
        )
    group = FORMATS[name].group(layer, marker)
    return LayerQuant(format=name, full_precision=full_precision, convrot_group=group)


def _check_layers(
    tensors: Mapping[str, TensorInfo], layers: Mapping[str, LayerQuant]
) -> dict[str, tuple[int, int]]:
    by_layer: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        layer, _, suffix = name.rpartition(".")
        by_layer[layer][suffix] = info
    shapes = {}
    for layer, quant in layers.items():
        expected: Format = FORMATS[quant.format]
        infos = by_layer.get(layer, {})
        missing = [suffix for suffix in expected.required if suffix not in infos]
        if missing:
            raise CheckpointError(f"{quant.format} layer {layer} has no {', '.join(missing)}")
        extra = sorted(set(infos) - set(expected.suffixes))
        if extra:
            raise CheckpointError(
                f"{quant.format} layer {layer} has the unexpected tensor {extra[0]}; "
                f"allowed: {', '.join(expected.suffixes)}"
            )
        shapes[layer] = expected.check(LayerTensors(layer=layer, infos=infos), quant)
    return shapes


def _refuse_foreign_layouts(metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """Head-interleaved QKV has the same keys and shapes: only provenance in the metadata shows it.

    Official shards and WanGP's bf16 files are interleaved (checkpoints.md 0.7, A5). A file without
    such metadata cannot be told apart.
    """
    said = [(key, value) for key, value in metadata.items() if "qkv" in key.lower()]
    for key, value in said:
        if "interleav" in (key + value).lower() and value.lower() not in ("false", "0", "no"):
            raise CheckpointError(
                f"its metadata says {key}={value:.60}: the QKV rows are interleaved per head; "
                "use a ComfyUI repack (rows grouped as all Q, all K, all V)"
            )
    qkv = tensors.get("blocks.0.attn.qkv_proj.weight")
    wangp = any(key.startswith("adaln_curve_") for key in metadata)
    if qkv and wangp and not said and qkv.dtype in ("BF16", "F16", "F32"):
        raise CheckpointError(
            f"its metadata shows a WanGP file with {qkv.dtype} QKV, whose rows are interleaved per "
            "head; use a ComfyUI repack (rows grouped as all Q, all K, all V)"
        )


def _refuse_rotated_nvfp4(metadata: Mapping[str, str], layers: Mapping[str, LayerQuant]) -> None:
    """Rotated NVFP4 files carry plain markers; some say so in the metadata (checkpoints.md A5)."""
    layer = next((name for name, quant in layers.items() if quant.format == "nvfp4"), None)
    if layer is None:
        return
    for key, value in metadata.items():
        if key == _METADATA:
            continue
        text = f"{key}={value}".lower()
        if any(word in text for word in ("hadamard", "rotat", "convrot", "quarot")):
            raise CheckpointError(
                f"layer {layer} is rotated nvfp4 (metadata {key}={value:.60}), "
                "which is not supported"
            )
