"""Settings of a run, read from ComfyUI's own description of the graph (the hidden input PROMPT)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Graph = Mapping[str, Mapping[str, Any]]  # node id -> {"class_type": ..., "inputs": {...}}

# (setting, input names that hold it); the first node upstream that has one decides.
SETTINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sampler", ("sampler_name",)),
    ("scheduler", ("scheduler",)),
    ("steps", ("steps",)),
    ("denoise", ("denoise",)),
    ("seed", ("noise_seed", "seed")),
    ("cfg", ("cfg",)),
    ("prompt", ("prompt",)),
    ("ref_image_size", ("ref_image_size",)),
    ("shift_video", ("shift_video",)),
    ("shift_audio", ("shift_audio",)),
    ("dit_file", ("unet_name",)),
)


def settings(graph: Graph | None, node: str) -> dict[str, Any]:
    """What the nodes upstream of `node` say; a value that another node computes is left out."""
    found: dict[str, Any] = {}  # None: the nearest node that has it gets it from another one
    for inputs in _upstream(graph or {}, str(node)):
        for name, keys in SETTINGS:
            for key in keys:
                if name not in found and inputs.get(key) is not None:
                    found[name] = _literal(graph or {}, inputs[key])
    return {name: value for name, value in found.items() if value is not None}


def finite(value: Any) -> Any:
    """The graph without NaN, which ComfyUI writes into it and JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _upstream(graph: Graph, node: str) -> Iterator[Mapping[str, Any]]:
    """The inputs of every node that feeds `node`, nearest first."""
    waiting, seen = [node], {node}
    while waiting:
        inputs = graph.get(waiting.pop(0), {}).get("inputs", {})
        yield inputs
        for value in inputs.values():
            if _is_link(value) and str(value[0]) not in seen:
                seen.add(str(value[0]))
                waiting.append(str(value[0]))


def _literal(graph: Graph, value: Any) -> Any:
    """The value, or the one that a node with nothing but `value` (a primitive) holds."""
    if not _is_link(value):
        return value
    inputs = graph.get(str(value[0]), {}).get("inputs", {})
    only = inputs.get("value") if set(inputs) == {"value"} else None
    return None if _is_link(only) else only


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)
