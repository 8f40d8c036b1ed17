"""What our own done runs tell of a request before it runs: its time and its memory."""

from __future__ import annotations

import re
from pathlib import Path

from app import records
from app.jobs import Job, JobStore
from app.needs import Past
from app.session import Session
from runtime.messages import Plan, Request

_ALIKE = 0.02  # of the packed rows: closer than the formula is
_RECENT = 300  # done jobs that are looked at
_ENOUGH = 5  # records that are read
_ROWS = re.compile(r"(\d+) (?:packed rows|tokens\b.*)")  # of H3, of LTX


def past_of(
    session: Session,
    jobs: JobStore,
    root: Path,
    request: Request,
    plan: Plan,
    rows: int | None,
) -> Past:
    """rows: packed rows of the request; without them no run is known to have been alike."""
    peaks: list[int] = []
    if rows is not None:
        for job in jobs.list(states=("done",), kinds=("generate",), limit=_RECENT):
            if len(peaks) < _ENOUGH and _same(job, request, plan):
                peaks += _peak(root / job.id, rows)
    return Past(
        typical=session.typical(request, plan),
        peak_bytes=max(peaks, default=0),
        peak_runs=len(peaks),
    )


def _same(job: Job, request: Request, plan: Plan) -> bool:
    """Of the same plan, size and guidance; steps do not move the peak."""
    told = job.request
    return (
        told is not None
        and told.family == request.family
        and job.plan == plan
        and (told.width, told.height, told.frames)
        == (request.width, request.height, request.frames)
        and (told.cfg != 1.0) == (request.cfg != 1.0)
    )


def _peak(folder: Path, rows: int) -> list[int]:
    try:
        record = records.finished(folder)
    except ValueError:  # damaged: it tells nothing
        record = None
    if record is None:
        return []
    notes = [match for note in record["notes"] if (match := _ROWS.fullmatch(note["text"]))]
    peak = (record.get("result") or {}).get("peak_memory_bytes", 0)
    alike = notes and abs(int(notes[0][1]) - rows) <= _ALIKE * rows
    return [peak] if alike and peak else []
