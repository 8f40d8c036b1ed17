"""Runs as one user may see them: looked up by id, searched, and read while they still go on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from app import records
from app.access import User
from app.console import Console
from app.errors import Missing
from app.incoming import look
from app.jobs import Job, Kind, State
from app.records import Record
from app.stored import plain
from runtime.quoted import cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a list of runs is narrowed to; an empty field does not narrow."""

    text: str = ""
    plan: str = ""
    states: tuple[State, ...] = ()
    kinds: tuple[Kind, ...] = ()
    since: float = 0.0  # epoch seconds of when the job was made
    until: float = 0.0
    limit: int = 60
    before: str = ""  # id of the last run of the page before


def own(console: Console, who: User, id: str) -> Job:
    """The user's job; Missing also for somebody else's, who may not learn that it exists."""
    job = console.jobs.get(id)
    if job is None or not (who.admin or job.owner == who.name):
        raise Missing(f"there is no run {cut(id)}")
    return job


def search(console: Console, who: User, wanted: Search) -> tuple[tuple[Job, ...], bool]:
    """(jobs, more): the newest first, and whether an older one matches too."""
    found = console.jobs.list(
        states=wanted.states,
        kinds=wanted.kinds,
        owner=None if who.admin else who.name,
        text=wanted.text,
        limit=wanted.limit + 1,
        before=own(console, who, wanted.before).id if wanted.before else None,
        plan=wanted.plan,
        since=wanted.since or None,
        until=wanted.until or None,
    )
    return found[: wanted.limit], len(found) > wanted.limit


def folder(console: Console, job: Job) -> Path:
    """The run folder; Missing while the job has none."""
    found = records.inside(console.root, job.id)
    if found is None:
        raise Missing(f"run {job.id} has no folder yet; it is {job.state}")
    return found


def file(console: Console, job: Job, name: str, what: str) -> Path:
    """A file of the run folder; Missing says what is not there."""
    found = records.inside(console.root, job.id, name)
    if found is None:
        raise Missing(f"run {job.id} has no {what}; it is {job.state}")
    return found


def thumb(console: Console, job: Job) -> Path:
    """The small picture of a run's video; made once, by a child process."""
    made = records.inside(console.root, job.id, records.THUMB)
    if made is not None:
        return made
    video = file(console, job, records.VIDEO, "video")
    with console.media.probes:  # a page full of new runs asks for many at once
        made = video.with_name(records.THUMB)
        if not made.is_file():
            look("probe", video, f"the video of {job.id}", made)
    return made


def record(console: Console, job: Job) -> Record:
    """run.json; of a run that has none, what is known of it by now."""
    place = records.inside(console.root, job.id)
    kept = records.finished(place) if place else None
    if kept is not None:
        return {**kept, "state": job.state}
    live = console.session.live(job.id)
    ready = console.session.engine_state().ready
    notes = [{"text": note.text, "warning": note.warning} for note in live.notes] if live else []
    stages = [plain(stage) for stage in live.stages] if live else []
    return {
        "id": job.id,
        "state": job.state,
        "started": datetime.fromtimestamp(job.started).astimezone().isoformat()
        if job.started
        else "",
        "seconds": max(0.0, job.ended - job.started) if job.ended else 0.0,
        "request": plain(job.request) if job.request else None,
        "plan": plain(job.plan),
        "engine": plain(ready) if live and live.began and ready else None,
        "notes": notes,
        "stages": stages,
        "result": None,
        "failure": {"stage": job.stage, "reason": job.reason, "details": ""}
        if job.reason
        else None,
    }


def shown(found: Record, who: User) -> Record:
    """The record as this user may read it: only an admin learns this machine's folders."""
    return found if who.admin else records.without_folders(found)
