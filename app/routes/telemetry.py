"""/api/v1/telemetry: samples and marks of the last half hour, the devices, the sampling rate."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import BaseModel

from app.access import User, UserDependency
from app.console import Console

_CHANGING = {"Cache-Control": "no-store"}


class Rate(BaseModel):
    """How often to sample, and for how long; afterwards it is once a second again."""

    hz: float
    seconds: float = 60.0


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; nothing here tells whose a run is."""
    routes = APIRouter(prefix="/telemetry", tags=["telemetry"])
    asked = Depends(user)

    @routes.get("")
    def samples(
        who: User = asked,
        since: Annotated[float, Query(ge=0)] = 0.0,
        most: Annotated[int, Query(ge=1, le=20_000)] = 900,
    ) -> Response:
        """{now, hz, samples, marks} newer than `since` (epoch seconds), thinned to `most`."""
        text = console.telemetry.since(since, most)
        return Response(text, media_type="application/json", headers=_CHANGING)

    @routes.get("/info")
    def info(who: User = asked) -> dict[str, Any]:
        """Driver, GPUs in the order of the samples and topology; `reason` if there are none."""
        return console.telemetry.info()

    @routes.get("/links")
    def links(who: User = asked) -> dict[str, Any]:
        """{gpus: [[[sent, received] of each NVLink]]} in bytes/s; read only while asked for."""
        return {"gpus": console.telemetry.links()}

    @routes.post("/rate")
    def rate(wanted: Rate, who: User = asked) -> dict[str, float]:
        """Samples faster or slower for a while."""
        console.telemetry.set_rate(wanted.hz, wanted.seconds)
        return {"hz": console.telemetry.hz}

    return routes
