"""What a run folder tells: its files, its run.json, and the timings in it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from app import families
from app.timing import columns
from runtime.messages import StageTime

VIDEO, LATENTS, PREVIEW, THUMB = "result.mp4", "latents.safetensors", "preview.webp", "thumb.webp"
TELEMETRY = "telemetry.jsonl"

Record = dict[str, Any]

_STAGE_FIELDS = frozenset(field.name for field in fields(StageTime))
_PATHS_OF_RESULT = ("video", "latents", "record")
_SIZES = ("family", "width", "height", "frames", "fps")
_SHAPE = (*_SIZES, "steps", "sampler", "scheduler", "seed", "cfg")


def inside(root: Path, id: str, name: str = "") -> Path | None:
    """The folder of a run or a file in it; None if missing or if a name or link leads out."""
    folder = (root / id).resolve()
    if folder.parent != root.resolve() or not folder.is_dir():
        return None
    if not name:
        return folder
    file = (folder / name).resolve()
    return file if file.is_relative_to(folder) and file.is_file() else None


def finished(folder: Path) -> Record | None:
    """run.json, None while there is none; ValueError if it is damaged."""
    path = folder / "run.json"
    if not path.is_file():
        return None
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"run.json of {folder.name} is damaged ({error}); delete the run") from (
            error
        )
    return record


def stage_times(record: Record) -> tuple[StageTime, ...]:
    """The stages of a record; an older one may lack fields that have a default."""
    return tuple(
        StageTime(**{name: value for name, value in stage.items() if name in _STAGE_FIELDS})
        for stage in record["stages"]
    )


def timings(record: Record, *, live: bool) -> dict[str, Any]:
    """The timings of one run with the conditions they were measured under."""
    stages = stage_times(record)
    engine, result = record.get("engine") or {}, record.get("result") or {}
    load_seconds = engine.get("load_seconds")
    return {
        "id": record["id"],
        "live": live,
        "state": record["state"],
        "plan": record["plan"]["name"],
        "conditions": {
            **_checkpoints(record["plan"]),
            **_settings(record["plan"]),
            **engine.get("resolved", {}),
        },
        "shape": _shape(record["request"] or {}),
        "load_seconds": load_seconds,
        "peak_memory_bytes": result.get("peak_memory_bytes") or None,
        "stages": [
            {
                "stage": s.stage,
                "seconds": s.seconds,
                "start": s.start,
                "rank": s.rank,
                "step": s.step,
                "peak_bytes": s.peak_bytes or None,
            }
            for s in stages
        ],
        "columns": columns(stages, load_seconds=load_seconds),
    }


def _shape(request: Record) -> dict[str, Any]:
    """What was asked for, and what the recipe of its family decides."""
    family = families.named(request.get("family", "h3"))
    known = {**family.fixed, **request, "family": family.name} if request else {}
    kinds = [r["kind"] for r in known.get("references", ())]
    kinds += ["image"] if known.get("image") else []
    return {**{name: known[name] for name in _SHAPE if name in known}, "references": kinds}


def without_folders(record: Record) -> Record:
    """The record for somebody who shall not see this machine's folders: files by name only."""
    shown: Record = json.loads(json.dumps(record))
    request = shown.get("request") or {}
    for reference in request.get("references", ()):
        _shorten(reference, ("path", "soundtrack"))
    _shorten(request, ("image",))
    models = (shown.get("plan") or {}).get("models") or {}
    _shorten(models, tuple(models))
    _shorten(shown.get("result") or {}, _PATHS_OF_RESULT)
    if shown.get("failure"):
        shown["failure"]["details"] = ""  # a traceback
    return shown


def _shorten(values: Record, names: tuple[str, ...]) -> None:
    for name in names:
        if isinstance(values.get(name), str):
            values[name] = Path(values[name]).name


def _settings(plan: Record) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name not in ("name", "models")}


def _checkpoints(plan: Record) -> dict[str, str]:
    """Names of the files: a plan of the same name may have had others."""
    models = plan.get("models") or {}
    return {role: Path(file).name for role, file in models.items() if isinstance(file, str)}
