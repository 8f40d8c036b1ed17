"""Reads the plan of `launch.py parity --plan`: its backends, dtypes and the paths of its files.

A golden names the tiny checkpoints that it was made with, so the plan's files need not be there;
only a captured run is replayed with them.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
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
    models = _models(path, table.pop("models", {}))
    return Plan(models=models, **{"name": path.stem, **_typed(path, table)})


def _models(path: Path, table: Any) -> ModelFiles:
    """The four files, relative to the plan; an unnamed one is an empty path."""
    if not isinstance(table, dict):
        raise ValueError(f"models in {path.name} must be a table like [models], got {table!r}")
    names = ("dit", "text_encoder", "video_vae", "audio_vae", "tokenizer")
    named = {name: _file(path, name, table[name]) for name in names if name in table}
    files = ModelFiles(
        dit=named.get("dit", Path()),
        text_encoder=named.get("text_encoder", Path()),
        video_vae=named.get("video_vae", Path()),
        audio_vae=named.get("audio_vae", Path()),
        tokenizer=named.get("tokenizer"),
    )
    if "deepstack_layers" not in table:
        return files
    layers = table["deepstack_layers"]
    if not isinstance(layers, list) or [type(layer) for layer in layers] != [int, int, int]:
        raise ValueError(
            f"[models] deepstack_layers in {path.name} must be three whole numbers like "
            f"[0, 1, 2], got {layers!r}"
        )
    first, second, third = layers
    return replace(files, deepstack_layers=(first, second, third))


def _file(path: Path, name: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f"[models] {name} in {path.name} must be a path in quotes, got {value!r}")
    return path.parent / Path(value).expanduser()


def _typed(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    known = {"str": str, "int": int, "float": float, "bool": bool}
    types = {f.name: known.get(str(f.type)) for f in fields(Plan)}
    for key, value in table.items():
        wanted = types.get(key)
        if wanted is None:
            raise ValueError(f"unknown key {key!r} in {path.name}; a plan has {', '.join(types)}")
        if wanted is float and type(value) is int:
            table[key] = float(value)
        elif type(value) is not wanted:
            raise ValueError(f"{key} in {path.name} must be {wanted.__name__}, got {value!r}")
    return table
