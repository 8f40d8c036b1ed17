"""/api/v1/jobs: the queue, its jobs, and what can be done to them."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app import browse, records
from app.access import User, UserDependency
from app.console import Console
from app.errors import Forbidden
from app.jobs import ENDED, Job, Kind, State
from app.live import engine_json
from app.shapes import AnyRequestJson, job_json, request_json, request_of, several
from app.stored import plain


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Enqueue(_Strict):
    """One request on one plan, or on several: an A/B. force: also if it cannot fit on the GPU."""

    request: AnyRequestJson
    plans: list[str] = Field(min_length=1, max_length=8)
    keep_latents: bool = True
    force: bool = False


class Change(_Strict):
    """What shall be different; `before`: the id of a waiting job, null for the end."""

    request: AnyRequestJson | None = None
    plan: str | None = None
    before: str | None = None


class Queue(_Strict):
    """Whether the queue holds after the running job."""

    paused: bool


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; every one answers 404 for the job of another user."""
    routes = APIRouter(prefix="/jobs", tags=["jobs"])
    asked = Depends(user)
    session, store, plans = console.session, console.jobs, console.planning.plans

    def shown(job: Job, who: User) -> dict[str, Any]:
        return job_json(console, job, who)

    @routes.get("")
    def jobs(
        who: User = asked,
        state: str = "",
        kind: str = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> JSONResponse:
        """The queue in its order, then ended jobs, the newest first; of others only what waits."""
        states = several(state, get_args(State), "state")
        kinds = several(kind, get_args(Kind), "kind")
        ended = tuple(s for s in ENDED if not states or s in states)
        found = [
            job
            for job in store.queue()
            if (not states or job.state in states) and (not kinds or job.kind in kinds)
        ]
        if ended:
            owner = None if who.admin else who.name
            found += store.list(states=ended, kinds=kinds, owner=owner, limit=limit)
        forecasts = session.forecasts()
        answer = {
            "jobs": [job_json(console, job, who, forecasts) for job in found[:limit]],
            "paused": store.paused,
            "engine": engine_json(session.engine_state()),
        }
        return JSONResponse(answer)  # as it is: FastAPI would walk through every value

    @routes.post("", status_code=201)
    def enqueue(body: Enqueue, who: User = asked) -> dict[str, Any]:
        """Checks and enqueues; 429 when too many wait."""
        request = request_of(console, who, body.request)
        chosen = tuple(plans.get(name) for name in body.plans)
        if not body.force:
            for plan in chosen:
                console.planning.check_memory(request, plan)
        added = session.enqueue(who.name, request, chosen, keep_latents=body.keep_latents)
        return {"jobs": [shown(job, who) for job in added]}

    @routes.post("/queue")
    def queue(body: Queue, who: User = asked) -> dict[str, Any]:
        """Pauses or resumes the queue."""
        _need_admin(who, "pause the queue")
        session.pause(body.paused)
        return {"paused": store.paused}

    @routes.post("/queue/unload")
    def unload(who: User = asked) -> dict[str, Any]:
        """Ends the idle engine, which frees its memory."""
        _need_admin(who, "unload the engine")
        session.unload()
        return engine_json(session.engine_state())

    @routes.get("/{id}")
    def job(id: str, who: User = asked) -> dict[str, Any]:
        """A job with its request, its plan, its notes and the stages so far."""
        found = browse.own(console, who, id)
        record = browse.record(console, found)
        request = found.request and request_json(console, who, found.request)
        plan = {"plan": plain(found.plan)}
        return shown(found, who) | {
            "request": request,
            "task": found.task,
            "plan_fields": (plan if who.admin else records.without_folders(plan))["plan"],
            "notes": record["notes"],
            "stages": record["stages"],
        }

    @routes.patch("/{id}")
    def change(id: str, body: Change, who: User = asked) -> dict[str, Any]:
        """Edits or moves a waiting job."""
        browse.own(console, who, id)
        if body.request is not None or body.plan is not None:
            request = None if body.request is None else request_of(console, who, body.request)
            plan = None if body.plan is None else plans.get(body.plan)
            session.edit(id, request=request, plan=plan)
        if "before" in body.model_fields_set:
            session.move(id, body.before, owner=None if who.admin else who.name)
        return shown(store.need(id), who)

    @routes.post("/{id}/cancel")
    def cancel(id: str, who: User = asked) -> dict[str, Any]:
        """Stops a running job at its next step, or takes a waiting one out."""
        browse.own(console, who, id)
        return shown(session.cancel(id), who)

    @routes.post("/{id}/retry", status_code=201)
    def retry(id: str, who: User = asked) -> dict[str, Any]:
        """A new run of a job that failed, was cancelled or interrupted."""
        browse.own(console, who, id)
        return shown(session.retry(id), who)

    @routes.post("/{id}/duplicate", status_code=201)
    def duplicate(id: str, who: User = asked) -> dict[str, Any]:
        """A new job with the same request and plan."""
        browse.own(console, who, id)
        return shown(session.duplicate(id), who)

    @routes.delete("/{id}")
    def remove(id: str, who: User = asked) -> dict[str, Any]:
        """Deletes a job that does not run, with its folder."""
        browse.own(console, who, id)
        session.remove(id)
        return {"deleted": id}

    return routes


def _need_admin(who: User, what: str) -> None:
    if not who.admin:
        raise Forbidden(f"only an admin may {what}")
