"""/api/v1/doctor: what `launch.py doctor` finds on this machine, for admins."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Depends

from app.access import User, UserDependency
from app.children import run_child
from app.console import Console
from app.errors import Forbidden
from app.stored import plain

_SECONDS = 180.0  # importing torch on a cold disk, and checking every header


def router(console: Console, user: UserDependency) -> APIRouter:
    """The one route; it names folders of this machine."""
    routes = APIRouter(tags=["doctor"])

    @routes.get("/doctor")
    def examine(who: User = Depends(user)) -> dict[str, Any]:  # noqa: B008
        """{plan, ok, warning, fatal, checks} for the session's plan; takes some seconds."""
        if not who.admin:
            raise Forbidden("the doctor names folders of this machine; ask an admin")
        asked = {"plan": plain(console.session.plan), "root": str(console.root)}
        told: dict[str, Any] = json.loads(
            run_child(
                "app.doctor_child",
                what="the doctor",
                seconds=_SECONDS,
                memory_bytes=0,
                stdin=json.dumps(asked).encode(),
            )
        )
        return told

    return routes
