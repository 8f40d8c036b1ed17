"""Reads the plan of `launch.py parity --plan`: its backends and dtypes, without its checkpoints.

A golden names the tiny checkpoints that it was captured with, so a plan whose own files are not
on this machine can be held against it too.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from runtime.messages import ModelFiles, Plan

FOLDER = Path(__file__).parents[2] / "presets" / "plans"


def read_plan(name: str) -> Plan:
    """The plan of a TOML file or of a name in presets/plans; ValueError with one sentence."""
    path = Path(name).expanduser()
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.toml")))
        raise ValueError(f"there is no plan {name}; give a TOML file or one of {known}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    table.pop("models", None)
    return Plan(models=_NO_FILES, **{"name": path.stem, **_typed(path, table)})


_NO_FILES = ModelFiles(dit=Path(), text_encoder=Path(), video_vae=Path(), audio_vae=Path())


def _typed(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    types = {f.name: {"str": str, "int": int, "bool": bool}.get(str(f.type)) for f in fields(Plan)}
    for key, value in table.items():
        wanted = types.get(key)
        if wanted is None:
            raise ValueError(f"unknown key {key!r} in {path.name}; a plan has {', '.join(types)}")
        if type(value) is not wanted:
            raise ValueError(f"{key} in {path.name} must be {wanted.__name__}, got {value!r}")
    return table
