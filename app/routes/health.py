"""/api/v1/health and /session: how the console is, and who asks."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from app.access import Access, User
from app.console import Console
from app.live import engine_json
from app.share import Share


def router(console: Console, access: Access, share: Share) -> APIRouter:
    """The routes; unlike the others' they need to know the accounts and the link."""
    routes = APIRouter(tags=["health"])
    asked = Depends(access.need)

    @routes.get("/health")
    def health(who: User = asked) -> dict[str, Any]:
        """The engine's state and reason, the share link, open event streams."""
        return {
            "engine": engine_json(console.session.engine_state()),
            "share": share.json(),
            "streams": console.hub.readers,
        }

    @routes.get("/session")
    def session(who: User = asked) -> dict[str, Any]:
        """Who is signed in; boot changes with every start of the console."""
        return {
            "user": who.name,
            "admin": who.admin,
            "locked": not access.open,
            "boot": console.hub.boot,
            "plan": console.session.plan.name,
        }

    return routes
