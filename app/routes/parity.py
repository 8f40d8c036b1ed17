"""/api/v1/parity: the goldens, their import, parity runs with figures and pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, UploadFile
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from app import browse, parity_runs, records
from app.access import User, UserDependency
from app.console import Console
from app.errors import Forbidden, Missing, TooLarge
from app.golden_imports import MOST_BYTES, discard, import_folder, import_upload
from app.goldens import Golden, Goldens, facts_of
from app.job import Job
from app.presets import user_path
from app.shapes import job_json

_UNCHANGING = {"Cache-Control": "private, max-age=3600"}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MOST_FORM_BYTES = 1 << 20  # of an upload beside the file itself

Side = Literal["golden", "ours", "difference"]


class Run(BaseModel):
    """Which goldens, and whose settings: "" takes each golden's own."""

    model_config = ConfigDict(extra="forbid", strict=True)

    goldens: list[str] = Field(min_length=1, max_length=500)
    plan: str = ""


class Folder(BaseModel):
    """A folder of this machine."""

    model_config = ConfigDict(extra="forbid", strict=True)

    folder: str = Field(min_length=1)


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; every one answers 404 for the run or collection of another user."""
    routes = APIRouter(prefix="/parity", tags=["parity"])
    goldens = Goldens(console.root)
    _add_goldens(routes, goldens, Depends(user))
    _add_runs(routes, console, goldens, Depends(user))
    return routes


def _add_goldens(routes: APIRouter, goldens: Goldens, asked: Any) -> None:
    @routes.get("/goldens")
    def manifest(request: Request, who: User = asked) -> dict[str, Any]:
        """Every golden this user may run; `folders`: this page may import a folder by its path."""
        found = goldens.list(who)
        return {
            "goldens": [_golden_json(golden) for golden in found],
            "collections": [
                {"name": name, **facts_of(goldens.folder / name)}
                for name in dict.fromkeys(g.collection for g in found if g.origin == "imported")
            ],
            "folders": _local_admin(request, who),
        }

    @routes.post("/goldens", status_code=201)
    def upload(request: Request, file: UploadFile, who: User = asked) -> dict[str, str]:
        """A .safetensors golden, or a .zip of goldens with their checkpoints."""
        length = request.headers.get("content-length", "")
        if not length.isdigit() or int(length) > MOST_BYTES + _MOST_FORM_BYTES:
            raise TooLarge(f"an upload may have {MOST_BYTES >> 30} GiB; import its folder instead")
        name = import_upload(goldens, who.name, file.filename or "", file.file)
        return {"collection": name}

    @routes.post("/goldens/folder", status_code=201)
    def folder(request: Request, body: Folder, who: User = asked) -> dict[str, str]:
        """Copies a folder of this machine; for its admin, and not from elsewhere."""
        if not _local_admin(request, who):
            raise Forbidden(
                "a folder is imported by the admin from the machine that the console runs on; "
                "upload a zip of it instead"
            )
        return {"collection": import_folder(goldens, who.name, user_path(body.folder))}

    @routes.delete("/goldens/{collection}")
    def remove(collection: str, who: User = asked) -> dict[str, str]:
        """Deletes an imported collection; runs on it keep their figures and pictures."""
        discard(goldens.collection(who, collection))
        return {"deleted": collection}


def _add_runs(routes: APIRouter, console: Console, goldens: Goldens, asked: Any) -> None:
    @routes.post("", status_code=201)
    def enqueue(body: Run, who: User = asked) -> dict[str, Any]:
        """Checks and enqueues; 429 when too many jobs wait."""
        for golden in goldens.get(who, body.goldens):
            if problem := golden.problem or _missing(golden):
                raise ValueError(f"{golden.id} cannot be run: {problem}")
        plan = console.planning.plans.get(body.plan) if body.plan else console.session.plan
        task = {"goldens": list(dict.fromkeys(body.goldens)), "as_captured": not body.plan}
        job = console.session.enqueue_parity(who.name, plan, task)
        return {"job": job_json(console, job, who)}

    @routes.get("")
    def history(
        who: User = asked, limit: Annotated[int, Query(ge=1, le=200)] = 30
    ) -> dict[str, Any]:
        """Parity runs, the newest first, with how many cases ended how."""
        owner = None if who.admin else who.name
        found = console.jobs.list(kinds=("parity",), owner=owner, limit=limit)
        return {"runs": [_run_json(console, job, who) for job in found]}

    @routes.get("/{id}")
    def run(id: str, who: User = asked) -> dict[str, Any]:
        """How each case ended; while it runs, those that have, in `results` as events tell."""
        job = _own(console, who, id)
        shown = _run_json(console, job, who)
        return shown | {"results": _results(console, job)}

    @routes.get("/{id}/cases/{number}")
    def case(id: str, number: int, who: User = asked) -> FileResponse:
        """{"details": [...]}: every compared tensor of one case."""
        path = _file(console, _own(console, who, id), f"{parity_runs.CASES}/{number}.json")
        return FileResponse(path, media_type="application/json", headers=_UNCHANGING)

    @routes.get("/{id}/frames/{number}/{side}/{frame}")
    def frame(id: str, number: int, side: Side, frame: int, who: User = asked) -> FileResponse:
        """One picture of one case, PNG."""
        job = _own(console, who, id)
        results = _results(console, job)
        frames = results[number].get("frames") if 0 <= number < len(results) else None
        if not frames or "folder" not in frames:
            raise Missing(f"case {number} of run {id} has no pictures")
        name = f"{parity_runs.FRAMES}/{frames['folder']}/{side}_{frame:04d}.png"
        return FileResponse(_file(console, job, name), headers=_UNCHANGING)


def _own(console: Console, who: User, id: str) -> Job:
    job = browse.own(console, who, id)
    if job.kind != "parity":
        raise Missing(f"run {id} is no parity run")
    return job


def _file(console: Console, job: Job, name: str) -> Path:
    path = records.inside(console.root, job.id, name)
    if path is None:
        raise Missing(f"run {job.id} has no {name}; it is {job.state}")
    return path


def _results(console: Console, job: Job) -> list[dict[str, Any]]:
    report = _report(console, job)
    if report is not None:
        results: list[dict[str, Any]] = report["results"]
        return results
    path = records.inside(console.root, job.id, parity_runs.EVENTS)
    if path is None:
        return []
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [event for event in events if event["event"] == "result"]


def _report(console: Console, job: Job) -> dict[str, Any] | None:
    path = records.inside(console.root, job.id, parity_runs.REPORT)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


def _run_json(console: Console, job: Job, who: User) -> dict[str, Any]:
    report = _report(console, job) or {}
    return {
        "job": job_json(console, job, who),
        "goldens": job.task["goldens"],
        "as_captured": job.task["as_captured"],
        "counts": report.get("counts", {}),
        "device": report.get("device", ""),
        "seconds": report.get("seconds"),
    }


def _golden_json(golden: Golden) -> dict[str, Any]:
    """Without the folders of this machine."""
    fields = asdict(golden)
    hidden = ("path", "checkpoints")
    return {name: value for name, value in fields.items() if name not in hidden} | {
        "problem": golden.problem or _missing(golden)
    }


def _missing(golden: Golden) -> str:
    if not golden.missing:
        return ""
    return f"its checkpoints {', '.join(golden.missing)} are not in the collection; import them too"


def _local_admin(request: Request, who: User) -> bool:
    """An admin at this machine itself: a link that is shared arrives with another host name."""
    address = request.client.host if request.client else ""
    return who.admin and address in _LOOPBACK and request.url.hostname in _LOOPBACK
