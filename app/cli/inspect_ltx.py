"""What `launch.py inspect` adds for an LTX denoiser: release, licence, build, order of NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoints.header import CheckpointError, Header
from runtime.ltx.census import Census, read_census
from runtime.ltx.orders import (
    AUTO,
    Reading,
    ScaleStructure,
    detected,
    known_order,
    readings,
    scale_structure,
)

_LICENCE_SHOWN = 72
_ORDERS: Mapping[str, str] = {
    "high_tiled": "even column in the high nibble, scales in tiles of 128x4",
    "high_linear": "even column in the high nibble, scales row by row",
    "low_tiled": "even column in the low nibble, scales in tiles of 128x4",
    "low_linear": "even column in the low nibble, scales row by row",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """census: None when the header is refused. problem: why it cannot be loaded, "" if it can."""

    census: Census | None
    order: str  # "": not known, or nothing is packed
    readings: tuple[Reading, ...]  # against the bf16 copy, when one was given
    problem: str
    structure: ScaleStructure | None = None  # of an unmarked file, for which no copy was given


def facts_of(header: Header, against: Path | None) -> Facts:
    """Reads the header, and of `against` and the file three layers; refusals are the `problem`."""
    try:
        census = read_census(header)
    except CheckpointError as error:
        return Facts(census=None, order="", readings=(), problem=str(error))
    order, problem, structure = "", "", None
    found: tuple[Reading, ...] = ()
    try:
        census.check()
        found = readings(census, against) if against is not None else ()
        if census.index.layers:
            unmarked = census.markers == "none" and against is None
            structure = scale_structure(census) if unmarked else None
            order = _order(census, found)
    except CheckpointError as error:
        problem = str(error)
    return Facts(census=census, order=order, readings=found, problem=problem, structure=structure)


def _order(census: Census, found: tuple[Reading, ...]) -> str:
    """What the copy says, if there is one, else what markers or the census vouch for."""
    if not found:
        return known_order(census, AUTO)
    order = detected(found)
    if not order:
        raise CheckpointError(
            f"{census.header.path}: no order of nibbles and scales fits the copy (best "
            f"correlation {max(r.correlation for r in found):.3f}); give a copy of the same weights"
        )
    return known_order(census, order)  # markers may contradict it


def lines(facts: Facts) -> list[str]:
    """The facts for people; nothing when the header is refused."""
    census = facts.census
    if census is None:
        return []
    shown = [
        f"family ltx · release {census.version} · text tower {census.gemma_version or 'not said'}",
        f"licence {_licence(census.license)}",
        _build(census),
    ]
    if census.index.layers:
        order = facts.order
        shown.append(
            f"nvfp4 order {order}: {_ORDERS[order]} ({_why(facts)})"
            if order
            else "nvfp4 order not known"
        )
    shown += [
        f"order {r.order:<12} correlation {r.correlation:7.4f}   relative RMS {r.relative_rms:.4f}"
        for r in facts.readings
    ]
    shown += [_structure(facts.structure)] if facts.structure is not None else []
    unlike = census.unlike_published
    if unlike:
        shown.append(f"{len(unlike)} tensors in another float type, first: {unlike[0]}")
    return shown


def plain(facts: Facts) -> dict[str, Any] | None:
    """The facts as JSON holds them."""
    census = facts.census
    if census is None:
        return None
    return {
        "model_version": census.version,
        "license": census.license,
        "gemma_version": census.gemma_version,
        "markers": census.markers,
        "keyframes": census.keyframes,
        "connectors": census.connectors,
        "packed_layers": len(census.index.layers),
        "packed_blocks": census.packed_blocks,
        "official": census.official,
        "nvfp4_order": facts.order,
        "readings": [asdict(reading) for reading in facts.readings],
        "scale_structure": None if facts.structure is None else asdict(facts.structure),
        "unlike_published": list(census.unlike_published),
        "config": asdict(census.config),
    }


def _licence(text: str | None) -> str:
    if text is None:
        return "not said: the header has no license key"
    first = " ".join(text.split())
    if len(first) <= _LICENCE_SHOWN:
        return f'key: "{first}"'
    return f'key: "{first[:_LICENCE_SHOWN]}…" ({len(text):,} characters)'


def _build(census: Census) -> str:
    markers = {
        "none": "no quantisation markers",
        "header": "markers in the header",
        "tensors": "markers as tensors",
        "header and tensors": "markers in the header and as tensors",
    }
    facts = [markers[census.markers]] if census.index.layers else []
    facts += ["keyframes" if census.keyframes else "no keyframes tensor (counts as zeros)"]
    facts += ["connectors" if census.connectors else "no connectors"]
    if census.index.layers:
        layers, blocks = f"{len(census.index.layers):,}", census.packed_blocks
        facts.append(f"{layers} layers packed in {blocks} of {census.config.num_layers} blocks")
    return " · ".join(facts)


def _why(facts: Facts) -> str:
    census = facts.census
    assert census is not None
    if census.markers != "none":
        return "so its markers say"
    if census.official:
        return "it is the published file"
    return "fits the copy: set ltx_nvfp4_order to it in a plan"


def _structure(found: ScaleStructure) -> str:
    words = {"tiled": "which hints at tiles", "linear": "which hints at row by row"}
    hint = words.get(found.points_to, "which hints at neither")
    return (
        f"rows and columns explain {found.tiled:.2f} of the scales read as tiles and "
        f"{found.linear:.2f} read row by row, {hint}"
    )
