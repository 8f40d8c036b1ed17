"""/metrics for Prometheus, for whoever is signed in or brings the token."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from app import metrics
from app.access import User, UserDependency
from app.console import Console


def router(console: Console, user: UserDependency) -> APIRouter:
    """The one route; it tells numbers only, no prompt and no owner."""
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics", response_class=Response)
    def page(who: User = Depends(user)) -> Response:  # noqa: B008
        """GPUs, host, queue, engine, last run and the console itself as Prometheus text."""
        return Response(metrics.render(console), media_type=metrics.CONTENT_TYPE)

    return routes
