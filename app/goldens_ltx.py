"""What the manifest says of an LTX golden, whose header has other words than H3's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from runtime.ltx.sizes import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from runtime.parity.ltx_kinds import kind_of

KEY = "golden"  # of the metadata, where H3's is "header"


def as_header(document: Any, names: Iterable[str]) -> Any:
    """The document with the kind that its tensors show, and H3's words for what both have.

    One without params stays as it is, which is then no golden.
    """
    params = document.get("params") if isinstance(document, dict) else None
    if not isinstance(params, dict):
        return document
    world = document.get("environment")
    world = world if isinstance(world, dict) else {}
    version, _, commit = str(world.get("comfyui", "")).partition(" @")
    return {
        **document,
        "kind": kind_of(names),
        "params": {**params, **_sizes(params), **_sampling(params)},
        "environment": {**world, "comfyui_version": version, "comfyui_commit": commit},
    }


def needs(document: Mapping[str, Any]) -> tuple[str, ...]:
    """The name of its checkpoint, without its suffix."""
    checkpoint = document.get("checkpoint")
    file = checkpoint.get("file") if isinstance(checkpoint, dict) else None
    return (PurePosixPath(file).stem,) if isinstance(file, str) and file else ()


def _sizes(params: Mapping[str, Any]) -> dict[str, int]:
    """Pixels and frames of the latent sizes F, H, W."""
    latent = [params.get(name) for name in ("F", "H", "W")]
    if not all(type(size) is int and 0 < size < 1 << 20 for size in latent):
        return {}
    frames, height, width = (int(size) for size in latent if size is not None)
    return {
        "width": width * PIXELS_PER_LATENT,
        "height": height * PIXELS_PER_LATENT,
        "length": (frames - 1) * FRAMES_PER_LATENT + 1,
    }


def _sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(sigmas := params.get("sigmas"), list):
        found["steps"] = len(sigmas) - 1
    if "comfy_sampler" in params:
        found["sampler"] = params["comfy_sampler"]
    if "dtype" in params:
        found["compute"] = params["dtype"]
    return found
