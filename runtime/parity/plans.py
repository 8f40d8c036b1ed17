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
from runtime.quoted import quoted

FOLDER = Path(__file__).parents[2] / "presets" / "plans"
_FILES = ("dit", "text_encoder", "video_vae", "audio_vae")
_LAYERS = "deepstack_layers"


def read_plan(name: str) -> Plan:
    """The plan of a TOML file or of a name in presets/plans; ValueError with one sentence."""
    path = expanded(name)
    if path.suffix != ".toml":
        path = FOLDER / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.toml")))
        raise ValueError(f"there is no plan {name}; give a TOML file or one of {known}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    models = _models(path, table.pop("models", {}))
    return Plan.of(models=models, **{"name": path.stem, **_typed(path, table)})


def expanded(text: str) -> Path:
    """A path as typed, with its ~ replaced; ValueError for the home of a user who is not there."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text} leads nowhere ({error}); check the path") from error


def _models(path: Path, table: Any) -> ModelFiles:
    """The files, relative to the plan; one of the four that is not named is an empty path."""
    if not isinstance(table, dict):
        raise ValueError(
            f"models in {path.name} must be a table like [models], got {quoted(table)}"
        )
    known = [field.name for field in fields(ModelFiles)]
    if unknown := [name for name in table if name not in known]:
        raise ValueError(
            f"unknown key {quoted(unknown[0])} in [models] of {path.name}; it has "
            f"{', '.join(known)}"
        )
    named = {name: _file(path, name, value) for name, value in table.items() if name != _LAYERS}
    given: dict[str, Any] = {**dict.fromkeys(_FILES, Path()), **named}
    files = ModelFiles(**given)
    if _LAYERS not in table:
        return files
    layers = table[_LAYERS]
    if not isinstance(layers, list) or [type(layer) for layer in layers] != [int, int, int]:
        raise ValueError(
            f"[models] deepstack_layers in {path.name} must be three whole numbers like "
            f"[0, 1, 2], got {quoted(layers)}"
        )
    first, second, third = layers
    return replace(files, deepstack_layers=(first, second, third))


def _file(path: Path, name: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"[models] {name} in {path.name} must be a path in quotes, got {quoted(value)}"
        )
    return path.parent / expanded(value)


def _typed(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    known = {"str": str, "int": int, "float": float, "bool": bool}
    types = {f.name: known.get(str(f.type)) for f in fields(Plan)}
    for key, value in table.items():
        wanted = types.get(key)
        if wanted is None:
            raise ValueError(
                f"unknown key {quoted(key)} in {path.name}; a plan has {', '.join(types)}"
            )
        if wanted is float and type(value) is int:
            try:
                table[key] = float(value)
            except OverflowError as error:  # hundreds of digits
                raise ValueError(
                    f"{key} in {path.name} is too large, got {quoted(value)}"
                ) from error
        elif type(value) is not wanted:
            raise ValueError(f"{key} in {path.name} must be {wanted.__name__}, got {quoted(value)}")
    return table
