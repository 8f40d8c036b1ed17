"""/api/v1/presets, /plans, /backends, /preflight: what can be chosen, and whether it will run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from app import families, presets, records, stored
from app.access import User, UserDependency
from app.console import Console
from app.errors import Forbidden
from app.planning import Planning
from app.shapes import AnyRequestJson, request_of
from runtime.messages import ModelFiles, Plan
from runtime.quoted import quoted

_FILES = ("dit", "text_encoder", "video_vae", "audio_vae", "tokenizer", "vocoder", "upsampler")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ModelsJson(_Strict):
    """Paths of this machine, absolute or beginning with ~."""

    dit: str
    text_encoder: str
    video_vae: str
    audio_vae: str
    tokenizer: str | None = None
    deepstack_layers: tuple[int, int, int] | list[int] | None = None
    vocoder: str | None = None
    upsampler: str | None = None


class PlanJson(_Strict):
    """A plan as the editor sends it; what is left out has its family's default."""

    models: ModelsJson
    family: str | None = None
    device: str | None = None
    layout: str | None = None
    dtype: str | None = None
    attention: str | None = None
    vae_attention: str | None = None
    kj_mode: str | None = None
    sol_tau: float | None = None
    sol_sinks: str | None = None
    memory: str | None = None
    dense: str | None = None
    nvfp4: str | None = None
    fp8: str | None = None
    int8: str | None = None
    amax: str | None = None
    overlap: str | None = None
    transport: str | None = None
    row_split: str | None = None
    gather: str | None = None
    weights: str | None = None
    elementwise: str | None = None
    island_rounding: str | None = None
    video_vae_dtype: str | None = None
    vae_blend: str | None = None
    vae_tiles: int | None = None
    text_encoder: str | None = None
    adaln: str | None = None
    graphs: bool | None = None
    cache: str | None = None
    cache_threshold: float | None = None
    cache_warmup: int | None = None
    cache_max_run: int | None = None
    threads: int | None = None
    kernel_times: bool | None = None
    v2a_source: str | None = None
    ltx_rope_seconds: str | None = None
    ltx_tables: str | None = None
    ltx_rounding: str | None = None
    ltx_nvfp4_order: str | None = None


def _given(plan: Any) -> str:
    """Which of the two a body is meant to be: a refusal then names the field of that one."""
    return "name" if isinstance(plan, str) else "fields"


PlanOrName = Annotated[
    Annotated[str, Tag("name")] | Annotated[PlanJson, Tag("fields")], Discriminator(_given)
]


class Preflight(_Strict):
    """One request and the plan it would run with: a name, or an unsaved one of the editor."""

    request: AnyRequestJson
    plan: PlanOrName


def router(console: Console, user: UserDependency) -> APIRouter:
    """The routes; only an admin sees folders of this machine, and only an admin saves."""
    routes = APIRouter(tags=["plans"])
    planning = console.planning
    asked = Depends(user)
    _add_plans(routes, planning, asked)

    @routes.get("/presets")
    def requests(who: User = asked, family: str = "h3") -> dict[str, Any]:
        """The requests of a family that ship with the program."""
        names, wanted = presets.names("requests"), families.named(family).name
        loaded = {n: presets.load_any_request(presets.find("requests", n), id=n) for n in names}
        return {
            "presets": [
                {"name": name, "request": stored.plain(request)}
                for name, request in loaded.items()
                if request.family == wanted and not request.references
            ]
        }

    @routes.get("/backends")
    def backends(who: User = asked) -> dict[str, Any]:
        """Every backend and layout of this machine, as far as it has been probed."""
        return planning.backends()

    @routes.post("/backends/probe", status_code=202)
    def probe(who: User = asked) -> dict[str, Any]:
        """Asks this machine again; an event "backends" tells when it is done."""
        _need_admin(who, "probe this machine")
        planning.probe()
        return planning.backends()

    @routes.post("/preflight")
    def preflight(body: Preflight, who: User = asked) -> dict[str, Any]:
        """EstimateJson of one request; takes as long as reading its references."""
        request = request_of(console, who, body.request)
        if isinstance(body.plan, str):
            plan = planning.plans.get(body.plan)
        else:
            _need_admin(who, "check a plan that is not saved")
            plan = plan_of(body.plan, "edited")
        found = asdict(planning.estimate(request, plan)) | {"plan": plan.name}
        return found if who.admin else _without_folders(found, request.references, plan)

    return routes


def _add_plans(routes: APIRouter, planning: Planning, asked: Any) -> None:
    plans = planning.plans

    @routes.get("/plans")
    def listed(who: User = asked) -> dict[str, Any]:
        """Every plan with its fields; one whose file is damaged has a problem instead.

        runs: nothing is known that keeps this machine from running it.
        """
        return {"plans": [_entry(planning, name, who) for name in plans.names()]}

    @routes.get("/plans/{name}")
    def one(name: str, who: User = asked) -> dict[str, Any]:
        """A plan with its fields."""
        plans.get(name)
        return _entry(planning, name, who)

    @routes.put("/plans/{name}")
    def save(name: str, body: PlanJson, who: User = asked) -> dict[str, Any]:
        """Saves a plan under a name that no preset has."""
        _need_admin(who, "save a plan")
        plans.save(name, plan_of(body, name))
        return _entry(planning, name, who)

    @routes.delete("/plans/{name}")
    def delete(name: str, who: User = asked) -> dict[str, Any]:
        """Deletes a saved plan; jobs keep the plan that they were queued with."""
        _need_admin(who, "delete a plan")
        plans.delete(name)
        return {"deleted": name}


def plan_of(body: PlanJson, name: str) -> Plan:
    """The plan; ValueError names the field that is refused, or the families that there are."""
    values = body.model_dump(exclude_none=True, exclude={"models"})
    files = body.models.model_dump(exclude_none=True)
    layers = files.pop("deepstack_layers", None)
    if layers is not None:
        if len(layers) != 3:
            raise ValueError(f"deepstack_layers must be three whole numbers, got {len(layers)}")
        files["deepstack_layers"] = tuple(layers)
    for part in _FILES:
        if part in files:
            files[part] = _path(part, files[part])
    plan = Plan.of(name=name, models=ModelFiles(**files), **values)
    families.of_plan(plan)
    return plan


def _path(part: str, text: str) -> Path:
    path = presets.user_path(text)
    if not path.is_absolute():
        raise ValueError(f"{part} must be an absolute path or begin with ~, got {quoted(text)}")
    return path


def _entry(planning: Planning, name: str, who: User) -> dict[str, Any]:
    origin = planning.plans.names().get(name, "session")
    entry: dict[str, Any] = {"name": name, "origin": origin, "fields": None, "problem": ""}
    entry |= {"demo": False, "runs": False}
    try:
        found = planning.plans.get(name)
    except (ValueError, OSError) as error:
        return entry | {"problem": str(error)}
    plan = {"plan": stored.plain(found)}
    fields = (plan if who.admin else records.without_folders(plan))["plan"]
    runs = not planning.refusal(found)
    return entry | {"fields": fields, "demo": presets.is_demo(found), "runs": runs}


def _without_folders(
    found: dict[str, Any], references: tuple[Any, ...], plan: Plan
) -> dict[str, Any]:
    """The estimate for somebody who shall not see this machine's folders: files by name only."""
    for file in found["files"]:
        file["path"] = file["name"]
    paths = [getattr(plan.models, part) for part in _FILES]
    paths += [p for r in references for p in (r.path, r.soundtrack)]
    folders = {str(path.parent) + "/" for path in paths if path is not None}
    return _replaced(found, sorted(folders, key=len, reverse=True))


def _replaced(value: Any, folders: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(entry, folders) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(entry, folders) for entry in value]
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(folder, "")
    return value


def _need_admin(who: User, what: str) -> None:
    if not who.admin:
        raise Forbidden(f"only an admin may {what}")
