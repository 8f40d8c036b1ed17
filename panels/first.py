"""What the form holds in a browser that remembers no draft."""

from __future__ import annotations

from typing import Any

from app import presets
from runtime.messages import Plan


def request_json(preset: str) -> dict[str, Any]:
    """The request JSON of a preset, which has no references."""
    request = presets.load_request(presets.find("requests", preset), id="form")
    names = (name for name in request.__dataclass_fields__ if name not in ("id", "references"))
    return {name: getattr(request, name) for name in names} | {"references": []}


def first_draft(plan: Plan) -> dict[str, Any]:
    """The preset that suits the console's plan: the demo's, else the reference request."""
    preset = "demo" if presets.is_demo(plan) else "reference_960x544_124f"
    return {"request": request_json(preset), "plan": plan.name}
