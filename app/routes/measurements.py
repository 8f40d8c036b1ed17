"""/api/v1/measurements: what `launch.py sweep` and `bench` found, here and in docs/benchmarks."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from app import measurements
from app.access import User, UserDependency
from app.console import Console

_HEADING = ("id", "kind", "source", "when", "plan", "device")


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; they tell numbers, versions and names of plans, no prompt and no path."""
    routes = APIRouter(prefix="/measurements", tags=["measurements"])
    asked = Depends(user)

    @routes.get("")
    def all(who: User = asked) -> dict[str, Any]:
        """The newest first, each with the names of its subjects."""
        return {
            "measurements": [
                {
                    **{name: told[name] for name in _HEADING},
                    "subjects": [one["name"] for one in told["subjects"]],
                }
                for told in measurements.listed(console.root)
            ]
        }

    @routes.get("/{id}")
    def one(id: str, who: User = asked) -> dict[str, Any]:
        """Seconds, shares and bytes per layout (or subject) with the shape and versions."""
        return measurements.one(console.root, id)

    return routes
