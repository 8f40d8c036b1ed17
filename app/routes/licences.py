"""/api/v1/licences: the terms of weights that must be acknowledged, and whether they are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict

from app import licences
from app.access import User, UserDependency
from app.console import Console
from app.errors import Forbidden


class Acknowledge(BaseModel):
    """Which licence, and the plan whose weights it is acknowledged for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    licence: str
    plan: str


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; an admin acknowledges, for everybody who uses this machine."""
    routes = APIRouter(prefix="/licences", tags=["licences"])
    asked = Depends(user)
    plans = console.planning.plans

    @routes.get("")
    def listed(who: User = asked) -> dict[str, Any]:
        """Every licence with its terms and acknowledgements, and every plan that has one."""
        every = [licences.licence_json(one, console.root) for one in licences.LICENCES]
        if not who.admin:
            for one in every:
                one["acknowledgements"] = [{**a, "by": ""} for a in one["acknowledgements"]]
        return {"licences": every, "plans": [_state(console, name) for name in _bound(console)]}

    @routes.post("", status_code=201)
    def acknowledge(body: Acknowledge, who: User = asked) -> dict[str, Any]:
        """Keeps the acknowledgement; answers as the list does."""
        if not who.admin:
            raise Forbidden("only an admin may acknowledge a licence for this machine")
        licences.acknowledge(body.licence, plans.get(body.plan), console.root, by=who.name)
        return listed(who)

    return routes


def _bound(console: Console) -> list[str]:
    """Names of the plans whose weights have a licence; one that cannot be read has none."""
    found = []
    for name in console.planning.plans.names():
        try:
            plan = console.planning.plans.get(name)
        except (ValueError, OSError):  # told by /plans
            continue
        if licences.of_plan(plan) is not None:
            found.append(name)
    return found


def _state(console: Console, name: str) -> dict[str, Any]:
    """state: random weights | needed | acknowledged | unknown. files: those that it is about, and
    what their headers say; "file" and "metadata" are the first one's.
    """
    plan = console.planning.plans.get(name)
    licence = licences.of_plan(plan)
    assert licence is not None, "only plans with a licence are asked about"
    told: dict[str, Any] = {"plan": name, "licence": licence.id}
    try:
        found = licences.look(plan)
        needed = licences.needed(plan, console.root)
    except (ValueError, OSError):  # its files are not there: told by /preflight
        file = plan.models.dit.name
        return told | {"file": file, "metadata": None, "files": [], "state": "unknown"}
    under = [one for one in found if not one.random]
    first = (*needed, *under, *found)[0]
    state = "needed" if needed else "acknowledged" if under else "random weights"
    files = [{"file": one.file, "metadata": one.metadata} for one in needed or under]
    told |= {"file": first.file, "metadata": first.metadata}
    return told | {"files": files, "state": state}
