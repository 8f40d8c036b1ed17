"""What the REST interface takes and gives: requests from pages, jobs as JSON."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from app import families, presets, records
from app.access import User
from app.forecast import Forecast
from app.jobs import Job
from runtime.messages import FPS, LTXRequest, Ref2VARequest, Reference, Request
from runtime.quoted import quoted

if TYPE_CHECKING:
    from app.console import Console

JobJson = dict[str, Any]

_SETTINGS = ("width", "height", "frames", "steps", "sampler", "scheduler", "cfg")
_NEW = "new"  # the id of a request until the session gives it one


class ReferenceJson(BaseModel):
    """One reference by the ids of uploaded media."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["image", "video", "audio"]
    media: str
    soundtrack: str | None = None
    mute: bool = False


class RequestJson(BaseModel):
    """A request as pages send it; what is left out has the default of Ref2VARequest."""

    model_config = ConfigDict(extra="forbid", strict=True)

    family: Literal["h3"] = "h3"
    prompt: str
    references: list[ReferenceJson] = Field(default=[], max_length=64)
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    steps: int | None = None
    sampler: str | None = None
    scheduler: str | None = None
    seed: int | str | None = None  # as text: a page's numbers are exact up to 2^53 only
    cfg: float | None = None
    negative_prompt: str | None = None
    negative_references: bool | None = None
    shift_video: float | None = None
    shift_audio: float | None = None
    ref_image_size: str | None = None


class LTXRequestJson(BaseModel):
    """A request of family ltx as pages send it; image: the id of an uploaded picture."""

    model_config = ConfigDict(extra="forbid", strict=True)

    family: Literal["ltx"]
    prompt: str
    image: str | None = None
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: int | None = None
    seed: int | str | None = None


def _family(body: Any) -> str:
    """Which of the two a body is meant to be; one that names no family is H3's."""
    named = body.get("family", "h3") if isinstance(body, dict) else getattr(body, "family", "h3")
    return str(named)


def _of_known_family(body: Any) -> Any:
    """The body, unless it names a family that there is not: pydantic would speak of tags."""
    if isinstance(body, dict):
        families.named(body.get("family", "h3"))
    return body


AnyRequestJson = Annotated[
    Annotated[RequestJson, Tag("h3")] | Annotated[LTXRequestJson, Tag("ltx")],
    Discriminator(_family),
    BeforeValidator(_of_known_family),
]


def several(text: str, allowed: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """The comma separated values of a query; ValueError names the first that is not allowed."""
    found = tuple(part for part in text.split(",") if part)
    for part in found:
        if part not in allowed:
            raise ValueError(f"{what} must be of {', '.join(allowed)}, got {quoted(part)}")
    return found


def request_of(console: Console, who: User, body: RequestJson | LTXRequestJson) -> Request:
    """The request with the user's own media; ValueError or Missing with one sentence."""
    values = body.model_dump(exclude_none=True, exclude={"family", "references", "seed"})
    if body.seed is not None:
        values["seed"] = _seed(body.seed)
    if isinstance(body, LTXRequestJson):
        if body.image is not None:
            values["image"] = console.media.get(who, body.image).path
        return LTXRequest(id=_NEW, **values)
    references = tuple(_reference(console, who, one) for one in body.references)
    return Ref2VARequest(id=_NEW, references=references, **values)


def request_json(console: Console, who: User, request: Request) -> dict[str, Any]:
    """What AnyRequestJson reads back; a file that is in no library has the id ""."""
    values = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "id"}
    values |= {"family": request.family, "seed": str(request.seed)}
    if isinstance(request, LTXRequest):
        return values | {"image": request.image and _media(console, who, request.image)}
    references = [
        {
            "kind": reference.kind,
            "name": reference.path.name,
            "media": _media(console, who, reference.path),
            "soundtrack": _media(console, who, reference.soundtrack) or None,
            "mute": reference.mute,
        }
        for reference in request.references
    ]
    return values | {"references": references}


def job_json(
    console: Console, job: Job, who: User, forecasts: dict[str, Forecast] | None = None
) -> JobJson:
    """A job as this user may see it: of somebody else's only that it is there.

    forecasts: of the session, for a caller that asks for many jobs.
    """
    if forecasts is None:
        forecast = console.session.forecast(job)
    else:
        forecast = forecasts.get(job.id, Forecast())
    place = {"id": job.id, "state": job.state, "position": job.position, "kind": job.kind}
    place |= {"eta_seconds": forecast.eta, "wait_seconds": forecast.wait}
    place["denoise_seconds"] = forecast.denoise
    if not (who.admin or who.name == job.owner):
        return _FOREIGN | place
    return place | {
        **_request_facts(console, who, job.request),
        "owner": job.owner,
        "mine": job.owner == who.name,
        "group": job.group,
        "parent": job.parent,
        "plan": job.plan.name,
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "stage": job.stage,
        "done": job.done,
        "total": job.total,
        "detail": live.detail if (live := console.session.live(job.id)) else "",
        "reason": job.reason,
        "attempt": job.attempt,
        "keep_latents": job.keep_latents,
        "demo": presets.is_demo(job.plan),
        **_files(console, job),
    }


def job_event(console: Console, job: Job) -> JobJson:
    """A job as its owner's pages get it when it moves."""
    return job_json(console, job, User(name=job.owner))


_FOREIGN: JobJson = {
    "owner": "",
    "mine": False,
    "group": "",
    "parent": "",
    "plan": "",
    "prompt": "",
    "family": "",
    "width": 0,
    "height": 0,
    "frames": 0,
    "fps": 0,
    "steps": 0,
    "seed": "",
    "sampler": "",
    "scheduler": "",
    "cfg": 0.0,
    "references": [],
    "created": 0.0,
    "started": 0.0,
    "ended": 0.0,
    "stage": "",
    "done": 0,
    "total": 0,
    "detail": "",
    "reason": "",
    "attempt": 1,
    "keep_latents": True,
    "demo": False,
    "preview": "",
    "video": "",
    "thumb": "",
}
_ABOUT = ("prompt", "seed", "references", "family", "fps")
_NO_REQUEST = {name: _FOREIGN[name] for name in (*_ABOUT, *_SETTINGS)}


def _request_facts(console: Console, who: User, request: Request | None) -> JobJson:
    if request is None:
        return _NO_REQUEST
    settings = {name: getattr(request, name) for name in _SETTINGS}
    settings |= {"family": request.family, "fps": getattr(request, "fps", FPS)}
    references = [
        {"kind": r.kind, "name": r.path.name, "media": _media(console, who, r.path)}
        for r in request.references
    ]
    text = {"prompt": request.prompt, "seed": str(request.seed)}
    return settings | text | {"references": references}


def _files(console: Console, job: Job) -> JobJson:
    """Addresses of what the run folder holds by now (no Path: a list asks for hundreds)."""
    folder, url = f"{console.root}/{job.id}", f"/api/v1/runs/{job.id}"
    video = job.state == "done" and os.path.isfile(f"{folder}/{records.VIDEO}")
    live = console.session.live(job.id)
    step = live.preview_step if live is not None else 0
    preview = job.state != "queued" and step >= 0 and os.path.isfile(f"{folder}/{records.PREVIEW}")
    return {
        "preview": f"{url}/preview?step={step}" if preview else "",
        "video": f"{url}/video" if video else "",
        "thumb": f"{url}/thumb" if video else "",
    }


def _reference(console: Console, who: User, one: ReferenceJson) -> Reference:
    soundtrack = None if one.soundtrack is None else console.media.get(who, one.soundtrack).path
    path = console.media.get(who, one.media).path
    return Reference(kind=one.kind, path=path, soundtrack=soundtrack, mute=one.mute)


def _media(console: Console, who: User, path: Path | None) -> str:
    found = None if path is None else console.media.find(who, path)
    return "" if found is None else found.id


def _seed(value: int | str) -> int:
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(f"seed must be a whole number from 0 to 2^64-1, got {quoted(text)}")
    return int(text)
