"""What a killed console left: run folders get their run.json, and unknown runs are adopted."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from app import recording, records, runs, stored
from app.history import times_of
from app.jobs import ENDED, Job, JobStore, State
from runtime.media.files import DiskFullError, remove_parts
from runtime.messages import Failure, StageTime

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # a folder that can be named in an address
_STAGE_FIELDS = [field.name for field in fields(StageTime)]


def recover(jobs: JobStore, root: Path) -> tuple[Job, ...]:
    """Settles what was running when the console was killed; returns those jobs, now ended.

    The folder first, then the store: killed in between, the next start does it again.
    """
    killed = jobs.list(states=("running", "cancelling"))
    for job in killed:
        job = replace(job, reason="the console was killed while this job ran; retry it")
        ended: dict[str, Any] = {"state": "interrupted", "reason": job.reason, "ended": time.time()}
        if job.request is not None:
            ended |= _mended(job, root / job.id)
        jobs.update(job.id, **ended)
    return tuple(jobs.need(job.id) for job in killed)


def adopt(jobs: JobStore, root: Path, owner: str) -> int:
    """Puts runs that `launch.py generate` made here into the history; returns how many."""
    count, known = 0, jobs.ids()
    for file in sorted(root.glob("*/run.json")):
        id = file.parent.name
        if id in known or file.parent.is_symlink() or not _NAME.fullmatch(id):
            continue
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            job, times = _adopted(id, record, owner)
            jobs.add(job, times=times)
        except Exception as error:  # anything may lie in a folder; the console starts all the same
            _LOG.warning("%s is no run of this version and is left alone: %s", file, error)
            continue
        count += 1
    return count


def _adopted(id: str, record: dict[str, Any], owner: str) -> tuple[Job, dict[str, float]]:
    if record["state"] not in ENDED:
        raise ValueError(f"its state is {record['state']!r}")
    started, ended = _span(record)
    times = _times(record)
    if not all(map(math.isfinite, (ended, *times.values()))):
        raise ValueError("it has times that are no numbers")
    failure = record["failure"] or {}
    job = Job(
        id=id,
        kind="generate",
        owner=owner,
        state=record["state"],
        request=replace(stored.request_of(record["request"]), id=id),
        task={},
        plan=stored.plan_of(record["plan"]),
        created=started,
        started=started,
        ended=ended,
        stage=failure.get("stage", ""),
        reason=failure.get("reason", ""),
    )
    return job, times


def _span(record: dict[str, Any]) -> tuple[float, float]:
    """When the run began and ended, seconds since the epoch."""
    started = datetime.fromisoformat(record["started"]).timestamp()
    return started, started + float(record["seconds"])


def _times(record: dict[str, Any]) -> dict[str, float]:
    if record["state"] != "done" or not record["stages"]:
        return {}
    stages = (StageTime(**{k: s[k] for k in _STAGE_FIELDS if k in s}) for s in record["stages"])
    return times_of(stages, (record["engine"] or {}).get("load_seconds", 0.0))


@dataclass(slots=True)
class _Told:
    """What events.jsonl says of a run."""

    began: float = 0.0
    latest: float = 0.0
    stage: str = "start"
    done: int = 0
    total: int = 0


def _mended(job: Job, folder: Path) -> dict[str, Any]:
    """How the run of a killed console ended; a folder that cannot be made whole is told."""
    try:
        recording.mend(folder / records.TELEMETRY)
        return _told_by_record(folder) or _settle(job, folder)
    except DiskFullError:  # nothing is damaged; the next start does it
        raise
    except Exception as error:  # whatever became of one folder, the console starts
        _LOG.warning("%s cannot be made whole: %s: %s", folder, type(error).__name__, error)
        return {"reason": f"{job.reason}; its folder is damaged"}


def _settle(job: Job, folder: Path) -> dict[str, Any]:
    """How the run ended by its events, with its folder made whole."""
    assert job.request is not None, "only generate jobs have a run folder of ours"
    folder.mkdir(exist_ok=True)
    parts = (part.name.split(".")[-2] for part in folder.glob("*.part"))
    remove_parts(folder, [int(pid) for pid in parts if pid.isdigit()])  # the ranks died with it
    told = _Told(began=job.started, latest=job.started)
    engine: dict[str, Any] | None = None
    notes, stages = [], []
    last: dict[str, Any] | None = None
    state: State = "interrupted"
    for event in _events(folder):
        kind, told.latest = event.pop("event"), event.pop("time")
        if kind == "Ready":
            engine = event
        elif kind == "Progress":
            told.stage, told.done, told.total = event["stage"], event["done"], event["total"]
        elif kind == "Note":
            notes.append({"text": event["text"], "warning": event["warning"]})
        elif kind == "StageTime":
            stages.append(event)
        elif kind == "Result":
            state, last, stages = "done", event, event["stages"]
            if event["video"] and not job.keep_latents:
                (folder / records.LATENTS).unlink(missing_ok=True)
                event["latents"] = None
        elif kind == "Failure":
            state, last = ("cancelled" if event["cancelled"] else "failed"), event
    if last is None:
        last = stored.plain(Failure(request_id=job.id, stage=told.stage, reason=job.reason))
    runs.write_record(
        folder,
        job.request,
        job.plan,
        state,
        started=told.began,
        seconds=max(0.0, told.latest - told.began),
        engine=engine,
        notes=notes,
        stages=stages,
        last=last,
    )
    ended = {"state": state, "reason": last.get("reason", ""), "ended": told.latest or time.time()}
    return ended | {"stage": told.stage, "done": told.done, "total": told.total}


def _told_by_record(folder: Path) -> dict[str, Any]:
    """What run.json says, written just before the kill; nothing without it, or if it is damaged."""
    try:
        if (record := records.finished(folder)) is None:
            return {}
        if record["state"] not in ENDED:
            raise ValueError(f"its state is {record['state']!r}")
        failure = record["failure"] or {}
        return {
            "state": record["state"],
            "stage": failure.get("stage", ""),
            "reason": failure.get("reason", ""),
            "times": _times(record),
            "ended": _span(record)[1],
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("%s is written anew from its events: %s", folder / "run.json", error)
        return {}


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    file = folder / "events.jsonl"
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError:  # a kill cuts the last line, a power cut leaves zeros
                return
            yield event
