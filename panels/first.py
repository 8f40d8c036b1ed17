"""What the form holds in a browser that remembers no draft, and what the page knows of families."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from app import families, presets
from runtime.messages import LTX_FPS, LTX_FRAMES, LTX_SIZE_MULTIPLE, LTX_STAGE_STEPS, Plan


def request_json(preset: str) -> dict[str, Any]:
    """The request JSON of a preset of either family, which has no references and no picture."""
    request = presets.load_any_request(presets.find("requests", preset), id="form")
    skip = ("id", "family", "references", "image")
    found = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in skip}
    without: dict[str, Any] = {"references": []} if request.family == "h3" else {"image": None}
    return {"family": request.family, **found, **without}


def first_draft(plan: Plan) -> dict[str, Any]:
    """Of each family the demo's preset while the plan is a demo, else one of a real size.

    ltx: what the form of LTX holds until somebody writes in it.
    """
    demo = presets.is_demo(plan)
    return {
        "request": request_json("demo" if demo else "reference_960x544_124f"),
        "ltx": request_json("ltx_demo" if demo else "ltx_768x512_121f"),
        "family": families.of_plan(plan).name,
        "plan": plan.name,
        "families": families_json(),
    }


def families_json() -> dict[str, Any]:
    """Titles by family, and the grid, limits and steps of LTX's recipe."""
    return {
        "h3": {"title": families.H3.title},
        "ltx": {
            "title": families.LTX.title,
            "stages": LTX_STAGE_STEPS,
            "multiple": LTX_SIZE_MULTIPLE,
            "frames": LTX_FRAMES,
            "fps": LTX_FPS,
        },
    }
