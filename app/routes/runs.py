"""/api/v1/runs: history, files, timings, export, comparison and the pinned baseline."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel

from app import browse, compare, exports, records
from app.access import User, UserDependency
from app.baselines import Baselines
from app.browse import Search
from app.console import Console
from app.jobs import Kind, State
from app.shapes import job_json, several

_UNCHANGING = {"Cache-Control": "private, max-age=3600"}
_CHANGING = {"Cache-Control": "no-store"}


class Pin(BaseModel):
    """Which run is the baseline."""

    id: str


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; every one answers 404 for the run of another user."""
    routes = APIRouter(prefix="/runs", tags=["runs"])
    baselines = Baselines(console.root)
    _add_lists(routes, console, baselines, Depends(user))
    _add_records(routes, console, Depends(user))
    _add_files(routes, console, Depends(user))
    return routes


def _add_lists(routes: APIRouter, console: Console, baselines: Baselines, asked: Any) -> None:
    def baseline(who: User) -> str:
        id = baselines.get(who.name)
        return id if console.jobs.get(id) is not None else ""  # it may have been deleted since

    @routes.get("")
    def search(
        who: User = asked,
        q: Annotated[str, Query(max_length=500)] = "",  # SQLite refuses 50,000
        plan: str = "",
        state: str = "",
        kind: str = "",
        since: Annotated[float, Query(alias="from", ge=0)] = 0.0,
        until: Annotated[float, Query(alias="to", ge=0)] = 0.0,
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
        before: str = "",
    ) -> dict[str, Any]:
        """Newest first; state and kind take several with commas; `before` is the last id shown."""
        wanted = Search(
            text=q,
            plan=plan,
            states=several(state, get_args(State), "state"),
            kinds=several(kind, get_args(Kind), "kind"),
            since=since,
            until=until,
            limit=limit,
            before=before,
        )
        jobs, more = browse.search(console, who, wanted)
        forecasts = console.session.forecasts()
        return {
            "runs": [job_json(console, job, who, forecasts) for job in jobs],
            "more": more,
            "baseline": baseline(who),
        }

    @routes.get("/baseline")
    def pinned(who: User = asked) -> dict[str, str]:
        """The id of the pinned run, "" without one."""
        return {"id": baseline(who)}

    @routes.put("/baseline")
    def pin(wanted: Pin, who: User = asked) -> dict[str, str]:
        """Pins a run of the user."""
        baselines.put(who.name, browse.own(console, who, wanted.id).id)
        return {"id": wanted.id}

    @routes.delete("/baseline")
    def unpin(who: User = asked) -> dict[str, str]:
        """No run is pinned any more."""
        baselines.put(who.name, "")
        return {"id": ""}

    @routes.get("/compare")
    def two(a: str, b: str, who: User = asked, latents: bool = True) -> dict[str, Any]:
        """b against a; latents=false leaves out the distance of the latents, which takes longer."""
        jobs = [browse.own(console, who, id) for id in (a, b)]
        pair = [browse.shown(browse.record(console, job), who) for job in jobs]
        found = compare.compare(*pair)
        if latents:
            found["latents"] = compare.latents(console.root, a, b)
        return found


def _add_records(routes: APIRouter, console: Console, asked: Any) -> None:
    @routes.get("/{id}")
    def run(id: str, who: User = asked) -> dict[str, Any]:
        """run.json and the job as lists show it; of a run without one, what is known by now."""
        job = browse.own(console, who, id)
        found = browse.shown(browse.record(console, job), who)
        latents = records.inside(console.root, job.id, records.LATENTS) is not None
        return {**found, "task": job.task, "latents": latents, "job": job_json(console, job, who)}

    @routes.get("/{id}/timings")
    def timings(id: str, who: User = asked) -> dict[str, Any]:
        """Stages and standard columns; `live` while they still grow."""
        job = browse.own(console, who, id)
        return records.timings(browse.record(console, job), live=not job.over)

    @routes.get("/{id}/timings.csv")
    def timings_csv(id: str, who: User = asked) -> Response:
        """The same as a table."""
        job = browse.own(console, who, id)
        found = records.timings(browse.record(console, job), live=not job.over)
        name = {"Content-Disposition": f'attachment; filename="{job.id}_timings.csv"'}
        return PlainTextResponse(exports.timings_csv(found), media_type="text/csv", headers=name)

    @routes.get("/{id}/export")
    def export(id: str, who: User = asked) -> StreamingResponse:
        """A zip of the run folder, made while it is sent."""
        job = browse.own(console, who, id)
        folder = browse.folder(console, job)
        record = browse.shown(browse.record(console, job), who)
        name = {"Content-Disposition": f'attachment; filename="{job.id}.zip"', **_CHANGING}
        stream = exports.zipped(folder, record, whole=who.admin)
        return StreamingResponse(stream, media_type="application/zip", headers=name)


def _add_files(routes: APIRouter, console: Console, asked: Any) -> None:
    @routes.get("/{id}/video")
    def video(id: str, who: User = asked) -> FileResponse:
        """The mp4, in ranges where they are asked for."""
        job = browse.own(console, who, id)
        path = browse.file(console, job, records.VIDEO, "video")
        return FileResponse(path, media_type="video/mp4", headers=_UNCHANGING)

    @routes.get("/{id}/thumb")
    def thumb(id: str, who: User = asked) -> FileResponse:
        """A small picture of the video, made when it is first asked for."""
        path = browse.thumb(console, browse.own(console, who, id))
        return FileResponse(path, media_type="image/webp", headers=_UNCHANGING)

    @routes.get("/{id}/latents")
    def latents(id: str, who: User = asked) -> FileResponse:
        """The final latents, where they were kept."""
        job = browse.own(console, who, id)
        path = browse.file(console, job, records.LATENTS, "latents")
        name = f"{job.id}_latents.safetensors"
        return FileResponse(path, media_type="application/octet-stream", filename=name)

    @routes.get("/{id}/preview")
    def preview(id: str, who: User = asked) -> Response:
        """What the newest step predicts; written anew by every step."""
        job = browse.own(console, who, id)
        path = browse.file(console, job, records.PREVIEW, "preview")
        picture = path.read_bytes()  # whole: a file that is replaced while it is sent has two sizes
        return Response(picture, media_type="image/webp", headers=_CHANGING)

    @routes.get("/{id}/telemetry")
    def telemetry(id: str, who: User = asked) -> FileResponse:
        """One sample a line, of the time of the run."""
        job = browse.own(console, who, id)
        path = browse.file(console, job, records.TELEMETRY, "telemetry")
        return FileResponse(path, media_type="application/x-ndjson", headers=_CHANGING)

    @routes.delete("/{id}")
    def delete(id: str, who: User = asked) -> dict[str, str]:
        """Deletes an ended or waiting run with its folder."""
        console.session.remove(browse.own(console, who, id).id)
        return {"deleted": id}
