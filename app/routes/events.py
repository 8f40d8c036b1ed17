"""/api/v1/events: the one stream of server-sent events."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Header
from fastapi.responses import StreamingResponse

from app.access import User, UserDependency
from app.console import Console

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def router(console: Console, user: UserDependency) -> APIRouter:
    """The route; a browser that comes back names the last event it saw by itself."""
    routes = APIRouter(tags=["events"])

    @routes.get("/events")
    async def events(
        who: User = Depends(user),  # noqa: B008
        last: str = "",
        last_event_id: str = Header(""),
    ) -> StreamingResponse:
        """Events of this user and of everybody; `last` or Last-Event-ID resumes after an id."""
        stream = console.hub.stream(who.name, admin=who.admin, last=last_event_id or last)
        return StreamingResponse(stream, media_type="text/event-stream", headers=_HEADERS)

    return routes
