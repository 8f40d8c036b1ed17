"""What `launch.py sweep` and `bench` measured, kept in <runs>/bench where the console finds it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from app import families, runs
from app.errors import Missing
from app.sweep import communication
from runtime.layouts import SINGLE, Layout
from runtime.media.files import write_json_atomic
from runtime.quoted import cut

FOLDER, RECORDS = "bench", "docs/benchmarks"  # of the runs; of the checkout
PUBLISHED = Path(__file__).parents[1] / RECORDS / "records.jsonl"
MOST = 100  # that are told
_MOST_BYTES = 16 << 20  # of a file that is read at all
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError)
_SHAPE = (
    *("family", "width", "height", "frames", "fps", "steps", "sampler", "scheduler", "seed", "cfg"),
)
_FIGURES = (
    "layout",
    "ranks",
    "ok",
    "reason",
    "step_seconds",
    "speedup",
    "efficiency",
    "exposed_communication_seconds",
    "exposed_communication_share",
    "imbalance_seconds",
    "communication_seconds",
    "communication_share",
    "expected_bytes",
    "nvlink_bytes",
    "rank_peak_bytes",
    "parity",
)

Told = dict[str, Any]


def check(root: Path) -> None:
    """ValueError before anything is measured if the result could not be kept."""
    place = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ValueError(
            f"the result cannot be kept in {root}: {place} is no folder that can be written to; "
            f"give --store another folder"
        )


def keep(root: Path, result: Mapping[str, Any]) -> Path:
    """Writes a file of its own: two that end at once do not meet."""
    path = root / FOLDER / f"{runs.new_id()}_{kind_of(result)}.json"
    write_json_atomic(path, dict(result))
    return path


def kind_of(result: Mapping[str, Any]) -> str:
    """sweep or bench."""
    return "sweep" if "sweep" in result else "bench"


def listed(root: Path, published: Path = PUBLISHED) -> list[Told]:
    """The newest first: those of the runs folder, then what is published and not among them.

    Damaged files and lines tell nothing.
    """
    found: dict[str, Told] = {}
    for told in (*_kept(root / FOLDER), *_published(published)):
        found.setdefault(f"{told['kind']} {told['when']} {told['request']}", told)
    return sorted(found.values(), key=lambda one: str(one["when"]), reverse=True)[:MOST]


def one(root: Path, id: str, published: Path = PUBLISHED) -> Told:
    """The measurement of that id; Missing if there is none."""
    for told in listed(root, published):
        if told["id"] == id:
            return told
    raise Missing(f"there is no measurement {cut(id)}; the list has those that are kept")


def _kept(folder: Path) -> Iterator[Told]:
    # names begin with the time
    for path in sorted(folder.glob("*.json"), reverse=True)[:MOST]:
        try:
            about = path.stat()
            yield from _read(path, about.st_mtime_ns) if about.st_size <= _MOST_BYTES else ()
        except OSError:
            continue


def _published(path: Path) -> Sequence[Told]:
    return _lines(path, path.stat().st_mtime_ns) if path.is_file() else ()


@lru_cache(maxsize=MOST)
def _read(path: Path, written: int) -> Sequence[Told]:
    """One file; `written` makes the answer of a changed file another one."""
    del written
    return _parsed(path.read_bytes(), path.stem, FOLDER)


@lru_cache(maxsize=1)
def _lines(path: Path, written: int) -> Sequence[Told]:
    del written
    lines = path.read_bytes().splitlines()
    return [told for n, line in enumerate(lines, 1) for told in _parsed(line, f"r{n}", RECORDS)]


def _parsed(text: bytes, id: str, source: str) -> Sequence[Told]:
    try:
        return (_told(json.loads(text), id, source),)
    except _DAMAGED:
        return ()


def _told(result: Told, id: str, source: str) -> Told:
    """One measurement without this machine's paths; sweeps and benches alike, a row a subject."""
    kind, request = kind_of(result), result["request"]
    sweep = kind == "sweep"
    found = [_layout(one) for one in result["layouts"]] if sweep else _subjects(result["subjects"])
    first = next((row for row in found if row["ok"]), found[0])
    plan = result["plan"] if sweep else result["subjects"][0]["plan"]
    return {
        "id": id,
        "request": str(request["id"]),
        "kind": kind,
        "source": source,
        "when": str(result["when"]),
        "plan": plan["name"],
        "device": first["device"] or plan["device"],
        "shape": _shape(request),
        "text_rows": result["text_rows"],
        "rows": first["rows"],
        "weights": result["weights"] if sweep else result["subjects"][0].get("weights", ""),
        "order": result["order"],
        "machine": first["machine"],
        "ratios": _ratios(result),
        "gpus": result.get("gpus", []),  # each alone
        "subjects": [{k: v for k, v in row.items() if k != "machine"} for row in found],
    }


def _shape(request: Told) -> Told:
    """What was asked for, and what the recipe of its family decides."""
    family = families.named(request.get("family", "h3"))
    known = {**family.fixed, **request, "family": family.name}
    references = [one["kind"] for one in request.get("references", ())]
    return {**{name: known[name] for name in _SHAPE if name in known}, "references": references}


def _layout(one: Told) -> Told:
    """A layout of a sweep; of one that failed there is its reason alone."""
    summary = one.get("summary", {})
    return {
        "name": one["layout"],
        **{name: one.get(name) for name in _FIGURES},
        **_measured(summary),
    }


def _subjects(subjects: Sequence[Told]) -> list[Told]:
    """Of a bench, in the words of a sweep; of LTX stage by stage, whose steps have other sizes."""
    if "sampling" not in subjects[0]:
        return [_subject(one) for one in subjects]
    stages = zip(*(one["sampling"] for one in subjects), strict=True)
    return [
        _subject({**one, **of, "name": _stage_name(one, of)})
        for stage in stages
        for one, of in zip(subjects, stage, strict=True)
    ]


def _stage_name(one: Told, of: Told) -> str:
    return f"{one['name']}, stage {of['stage']} ({of['video']:,} + {of['audio']:,} tokens)"


def _ratios(result: Told) -> list[Told]:
    """Of a step, or of a step of each stage ("of"), the second subject against the first."""
    found = result.get("ratio")
    if not found:
        return []
    first, second = (one["name"] for one in result["subjects"])
    of = {"": found} if "step" in found else found
    return [{"of": name, "first": first, "second": second, **own} for name, own in of.items()]


def _subject(one: Told) -> Told:
    layout = one["plan"].get("layout", SINGLE) if one["subject"] == "plan" else SINGLE
    figures = {
        **dict.fromkeys(_FIGURES),
        "layout": layout,
        "ranks": Layout.parse(layout).ranks,
        "ok": True,
        "reason": "",
        "step_seconds": one["step_seconds"],
        **communication(one),
        "rank_peak_bytes": one.get("rank_peak_bytes") or [one["peak_allocated_bytes"]],
    }
    return {"name": one["name"], **figures, **_measured(one)}


def _measured(summary: Told) -> Told:
    """What both keep of a subject: parts of a step, and under which conditions."""
    return {
        "rows": summary.get("rows"),
        "parts": summary.get("parts", {}),
        "stages": summary.get("stages", {}),
        "gpu": summary.get("gpu"),
        "load_seconds": summary.get("load_seconds"),
        "resolved": summary.get("resolved", {}),
        "machine": summary.get("machine", {}),
        "device": summary.get("device_name", ""),
    }
