"""Two runs against each other: the settings that differ, the times, the distance of the latents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app import families, records
from app.children import run_child
from app.records import Record
from runtime.media.files import write_json_atomic

TIMEOUT_SECONDS = 120.0
_SECTIONS = ("request", "plan", "machine")
_NEVER = {("request", "id")}


def compare(a: Record, b: Record) -> dict[str, Any]:
    """{"a", "b", "settings", "times", "peak_memory"}; b against a: deltas are b - a.

    ValueError for runs of two model families.
    """
    first, second = (families.named((one["request"] or {}).get("family", "h3")) for one in (a, b))
    if first is not second:
        raise ValueError(
            f"run A is of {first.title} and run B of {second.title}: two model families have "
            f"nothing to compare; choose two runs of one"
        )
    left, right = records.timings(a, live=False), records.timings(b, live=False)
    return {
        "a": a["id"],
        "b": b["id"],
        "settings": settings_that_differ(a, b),
        "times": [
            {"name": name, **_delta(seconds, dict(right["columns"]).get(name))}
            for name, seconds in left["columns"]
        ],
        "peak_memory": _delta(left["peak_memory_bytes"], right["peak_memory_bytes"]),
    }


def settings_that_differ(a: Record, b: Record) -> list[dict[str, Any]]:
    """Rows {"section", "name", "a", "b"}; null is a setting that only the other one has."""
    flat_a, flat_b = _flat(a), _flat(b)
    keys = dict.fromkeys((*flat_a, *flat_b))
    rows = [
        {"section": section, "name": name, "a": flat_a.get(key), "b": flat_b.get(key)}
        for key in keys
        if flat_a.get(key) != flat_b.get(key)
        for section, name in (key,)
    ]
    return sorted(rows, key=lambda row: _SECTIONS.index(row["section"]))


def latents(root: Path, a: str, b: str) -> dict[str, Any]:
    """{"video", "audio", "reason"}: figures of runtime.parity.latents, or why there are none.

    They are computed once, in a child process, and kept in the folder of b.
    """
    files = {id: records.inside(root, id, records.LATENTS) for id in (a, b)}
    missing = [id for id, file in files.items() if file is None]
    if missing:
        return _none(f"no latents were kept of {' and '.join(missing)}")
    file_a, file_b = files[a], files[b]
    assert file_a is not None and file_b is not None
    kept = file_b.with_name(f"compare_{a}.json")
    made_of = [[file.stat().st_size, file.stat().st_mtime_ns] for file in (file_a, file_b)]
    if kept.is_file():
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["made_of"] == made_of:
            return {**known["figures"], "reason": ""}
    try:
        figures = json.loads(
            run_child(
                "runtime.parity.latents",
                (file_a, file_b),
                what="comparing the latents",
                seconds=TIMEOUT_SECONDS,
            )
        )
    except ValueError as error:
        return _none(str(error))
    write_json_atomic(kept, {"made_of": made_of, "figures": figures})
    return {**figures, "reason": ""}


def _none(reason: str) -> dict[str, Any]:
    return {"video": None, "audio": None, "reason": reason}


def _delta(a: float | None, b: float | None) -> dict[str, float | None]:
    """b - a and b / a, where both were measured."""
    both = a is not None and b is not None
    return {
        "a": a,
        "b": b,
        "delta": b - a if a is not None and b is not None else None,
        "ratio": b / a if both and a and b is not None else None,
    }


def _flat(record: Record) -> dict[tuple[str, str], Any]:
    """(section, dotted name) -> value, without what is different in any two runs."""
    found: dict[tuple[str, str], Any] = {}
    parts = {
        "request": record["request"] or {},
        "plan": record["plan"],
        "machine": (record.get("engine") or {}).get("resolved", {}),
    }
    for section, values in parts.items():
        for name, value in _leaves(values, ""):
            if (section, name) not in _NEVER:
                found[section, name] = value
    return found


def _leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
    elif name == "references":
        items = [(f"reference {n}", inner) for n, inner in enumerate(value, 1)]
    else:
        return [(name, value)]
    return [leaf for key, inner in items for leaf in _leaves(inner, key)]
