"""Requests and plans as the JSON that the job store keeps, and back (also out of run.json)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.messages import LTXRequest, ModelFiles, Plan, Ref2VARequest, Reference, Request
from runtime.messages import plain as plain  # the job store's form of them

_LAYERS = "deepstack_layers"


def dump(value: Any) -> str:
    """A dataclass as one line of JSON; equal ones give the same text."""
    return json.dumps(asdict(value), default=str, ensure_ascii=False, sort_keys=True)


def request_of(data: dict[str, Any]) -> Request:
    """What `dump` or plain made of a request; ValueError for one of another version."""
    try:
        if data.get("family") == "ltx":
            return LTXRequest(**{**data, "image": _path(data["image"])})
        references = tuple(
            Reference(**{**r, "path": Path(r["path"]), "soundtrack": _path(r["soundtrack"])})
            for r in data["references"]
        )
        return Ref2VARequest(**{**data, "references": references})
    except (TypeError, KeyError) as error:
        raise ValueError(f"a stored request cannot be read: {error}") from error


def plan_of(data: dict[str, Any]) -> Plan:
    """What `dump` or plain made of a plan; ValueError for one of another version."""
    try:
        files = data["models"]
        models = ModelFiles(
            **{
                **files,
                **{part: _path(file) for part, file in files.items() if part != _LAYERS},
                _LAYERS: tuple(files[_LAYERS]),
            }
        )
        return Plan(**{**data, "models": models})
    except (TypeError, KeyError) as error:
        raise ValueError(f"a stored plan cannot be read: {error}") from error


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
