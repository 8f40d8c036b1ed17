"""Snapshots and form values as the plain dicts that the page's scripts draw; no gradio here."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from app import preflight
from app.session import Job, Snapshot
from app.timing import amount, stage_rows
from runtime.media.probe import MediaInfo, probe
from runtime.messages import FPS, Failure, Plan, Reference, ReferenceKind, Result, frame_count

TAGS: dict[ReferenceKind, str] = {"image": "Picture", "video": "Video", "audio": "Audio"}
_ENGINE = {
    "loading": "loading",
    "ready": "ready",
    "busy": "working",
    "failed": "stopped",
    "closed": "closed",
}
_TITLES = {
    "queued": "Waiting",
    "running": "Generating",
    "cancelling": "Cancelling",
    "done": "Done",
    "failed": "Failed",
    "cancelled": "Cancelled",
    "interrupted": "Interrupted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One reference of the form and what its file holds."""

    path: Path
    kind: ReferenceKind
    info: MediaInfo
    mute: bool = False

    def reference(self) -> Reference:
        """As the request wants it."""
        return Reference(kind=self.kind, path=self.path, mute=self.mute)


def upload(path: Path) -> Upload:
    """An uploaded file as a reference of its own kind; ValueError if it cannot be one."""
    info = probe(path)
    found = Upload(path=path, kind=info.kind, info=info)
    preflight.check_reference(found.reference())
    return found


def arrange(uploads: tuple[Upload, ...], act: str, index: int) -> tuple[Upload, ...]:
    """The list after a button of the strip: up, down, remove or mute of entry `index`."""
    items = list(uploads)
    if not 0 <= index < len(items):
        return uploads
    if act == "remove":
        del items[index]
    elif act == "mute":
        items[index] = replace(items[index], mute=not items[index].mute)
    elif act in ("up", "down"):
        other = index + (1 if act == "down" else -1)
        if 0 <= other < len(items):
            items[index], items[other] = items[other], items[index]
    return tuple(items)


def strip(uploads: tuple[Upload, ...]) -> dict[str, Any]:
    """The references with the tags that the prompt may use; each kind counts from 1."""
    seen: Counter[str] = Counter()
    items = []
    for item in uploads:
        seen[item.kind] += 1
        items.append(
            {
                "kind": item.kind,
                "tag": f"<{TAGS[item.kind]} {seen[item.kind]}>",
                "name": item.path.name,
                "facts": facts(item.info),
                "sound": bool(item.info.audio_codec),
                "mute": item.mute,
                "url": f"/gradio_api/file={quote(str(item.path))}",
            }
        )
    return {"items": items}


def facts(info: MediaInfo) -> str:
    """What a file holds, in a few words."""
    words = []
    if info.width:
        words.append(f"{info.width} × {info.height}")
    if info.kind == "video" and info.fps:
        words.append(f"{info.fps:.4g} fps")
    if info.kind != "image":
        words.append(f"{info.seconds:.1f} s")
    if info.audio_codec:
        channels = {1: "mono", 2: "stereo"}.get(info.audio_channels, f"{info.audio_channels} ch")
        words.append(f"{channels} {info.audio_rate / 1000:.4g} kHz")
    if info.hdr:
        words.append(info.hdr)
    return " · ".join(words)


def size(text: str) -> tuple[int, int]:
    """Width and height of "960x544"; ValueError with a sentence otherwise."""
    match = re.fullmatch(r"\s*(\d{1,5})\s*[x×*]\s*(\d{1,5})\s*", text or "")
    if match is None:
        raise ValueError(f"size must be width x height like 960x544, got {text!r}")
    return int(match[1]), int(match[2])


def whole(text: Any, what: str) -> int:
    """A whole number from a form field; ValueError with a sentence otherwise."""
    try:
        number = int(str(text).strip()) if not isinstance(text, float) else int(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what} must be a whole number, got {text!r}") from error
    if isinstance(text, float) and number != text:
        raise ValueError(f"{what} must be a whole number, got {text!r}")
    return number


def snap(frames: Any) -> tuple[int, str]:
    """The frame count that will be made, and a line that says so."""
    asked = min(max(whole(frames, "frames"), 5), 3592)
    made = frame_count(asked)
    line = f"{made} frames = {made / FPS:.2f} s at {FPS} fps"
    return made, line if made == frames else f"{frames} becomes {line} (17k + 5)"


def chip(now: Snapshot, plan: Plan) -> dict[str, Any]:
    """The engine's state for the header."""
    words = [plan.name, _ENGINE[now.engine]]
    if now.engine == "loading" and now.loading is not None and now.loading.total:
        words.append(f"{now.loading.stage} {amount(now.loading)}")
    return {"engine": now.engine, "text": " · ".join(words)}


def run(now: Snapshot) -> dict[str, Any]:
    """The run to show: the one that runs, else the newest."""
    job = now.latest
    if job is None:
        empty = "The video appears here." if now.engine != "failed" else ""
        return {"state": "idle", "title": "Result", "empty": empty, "error": now.reason}
    waiting = sum(other.state == "queued" for other in now.jobs)
    request = job.request
    view: dict[str, Any] = {
        "id": request.id,
        "state": job.state,
        "title": _TITLES[job.state],
        "phase": phase(job),
        "running": job.state in ("running", "cancelling"),
        "age_seconds": time.time() - job.started if job.started else 0,
        "done": job.done,
        "total": job.total,
        "waiting": f"{waiting} more waiting" if waiting and job.state != "queued" else "",
        "aspect": f"{request.width} / {request.height}",
        "empty": "" if job.ended else "The video appears here when it is done.",
        "facts": f"{request.width}x{request.height} · {request.frames} frames · "
        f"{request.steps} steps · {request.sampler} {request.scheduler} · seed {request.seed}",
        "notes": [{"text": note.text, "warning": note.warning} for note in job.notes],
    }
    if isinstance(job.last, Failure) and not job.last.cancelled:
        view["error"] = f"{job.last.stage}: {job.last.reason}"
    if isinstance(job.last, Result):
        view["video"] = f"/api/v1/runs/{quote(request.id)}/video" if job.last.video else ""
    if job.ended and job.stages:
        view["rows"] = stage_rows(
            job.stages,
            load_seconds=now.ready.load_seconds if now.ready else None,
            peak_memory_bytes=job.last.peak_memory_bytes if isinstance(job.last, Result) else 0,
        )
    return view


def phase(job: Job) -> str:
    """Where a running job is: "denoise, step 3 of 12"."""
    if job.ended or job.state == "queued":
        return ""
    if not job.total:
        return job.stage
    unit = "step " if job.stage == "denoise" else ""
    return f"{job.stage}, {unit}{job.done} of {job.total}"
