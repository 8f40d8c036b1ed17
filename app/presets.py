"""Requests and plans as TOML files: strict to read, and written so that they can be read again."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal

from app import families
from runtime.messages import ModelFiles, Plan, Ref2VARequest, Reference, Request
from runtime.quoted import MOST_TYPED, cut, quoted

FOLDER = Path(__file__).parents[1] / "presets"
DEMO = FOLDER / "demo"
LTX_DEMO = FOLDER.parent / "models" / "ltx_demo"  # of the plan ltx_cpu; make-demo writes it

Kind = Literal["requests", "plans"]


def names(kind: Kind) -> tuple[str, ...]:
    """The presets of a kind, by name, in alphabetical order."""
    return tuple(sorted(path.stem for path in (FOLDER / kind).glob("*.toml")))


def user_path(text: str | Path) -> Path:
    """A path as typed, with its ~ replaced; ValueError for one that leads nowhere."""
    try:
        path = Path(text).expanduser()
        path.resolve()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.lstat()
    except (RuntimeError, ValueError, OSError) as error:  # no such home, a loop, a name too long
        reason = error.strerror if isinstance(error, OSError) else error
        told = cut(str(text), MOST_TYPED)
        raise ValueError(f"{told} leads nowhere ({reason}); check the path") from error
    return path


def find(kind: Kind, name: str) -> Path:
    """The file of a preset name or of a path; ValueError lists the names."""
    path = user_path(name)
    if path.suffix == ".toml" or path.parent != Path("."):
        if not path.is_file():
            what = "is not an ordinary file" if path.exists() else "does not exist"
            raise ValueError(f"{path} {what}; give a TOML file or one of {_list(kind)}")
        return path
    if name not in names(kind):
        raise ValueError(f"no preset {quoted(name)} in presets/{kind}; there are {_list(kind)}")
    return FOLDER / kind / f"{name}.toml"


def load_request(path: Path, *, id: str, changes: Mapping[str, Any] | None = None) -> Ref2VARequest:
    """The H3 request of a TOML file with `changes` laid over it, as `load_any_request`."""
    request = load_any_request(path, id=id, changes=changes)
    if not isinstance(request, Ref2VARequest):
        raise ValueError(f"{path.name} is a request of family {request.family}; give one of h3")
    return request


def load_any_request(path: Path, *, id: str, changes: Mapping[str, Any] | None = None) -> Request:
    """The request of a TOML file with `changes` laid over it; paths are relative to the file.

    Its key "family" tells whose it is, without one H3's. Raises ValueError with one sentence for
    an unknown key, a wrong type or a refused value.
    """
    table = _read(path)
    family = families.named(table.pop("family", "h3"))
    of_h3 = family is families.H3
    references = _tables(path, table, "references") if of_h3 else None
    values = _values(path, table, family.request, skip=("id", "family", "references"))
    if references is not None:
        values["references"] = tuple(_reference(path, entry) for entry in references)
    changes = changes or {}
    families.check_choices(family, changes)
    values |= changes
    values.setdefault("prompt", "")
    request: Request = family.request(id=id, **values)
    return request


def load_plan(path: Path) -> Plan:
    """The plan of a TOML file; model paths are relative to the file, absolute, or begin with ~.

    ValueError with one sentence, also for a family that nobody knows.
    """
    table = _read(path)
    models = table.pop("models", None)
    if not isinstance(models, dict):
        raise ValueError(f"{path.name} has no table [models]; it names the four checkpoint files")
    values = _values(path, table, Plan, skip=("models",))
    files = _values(path, models, ModelFiles, where="[models] ")
    values.setdefault("name", path.stem)
    plan = Plan.of(models=ModelFiles(**files), **values)
    families.of_plan(plan)
    return plan


@functools.lru_cache(maxsize=64)  # asked for every job of a list
def is_demo(plan: Plan) -> bool:
    """The denoiser is a tiny one with random weights, of presets/demo or models/ltx_demo."""
    file = plan.models.dit.resolve()
    return any(file.is_relative_to(folder.resolve()) for folder in (DEMO, LTX_DEMO))


def dump_request(request: Request) -> str:
    """The request as TOML that load_any_request reads back (the id is not part of it)."""
    lines = _lines(request, skip=("id", "references"))
    for reference in request.references if isinstance(request, Ref2VARequest) else ():
        lines += ["", "[[references]]", *_lines(reference)]
    return "\n".join(lines) + "\n"


def dump_plan(plan: Plan) -> str:
    """The plan as TOML that load_plan reads back."""
    return "\n".join([*_lines(plan, skip=("models",)), "", "[models]", *_lines(plan.models)]) + "\n"


def _list(kind: Kind) -> str:
    return ", ".join(names(kind))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:  # a folder, a dead link, somebody else's
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{path} cannot be read ({reason}); put a TOML file there") from error


def _tables(path: Path, table: dict[str, Any], key: str) -> list[dict[str, Any]] | None:
    entries = table.pop(key, None)
    if entries is None:
        return None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f"{key} in {path.name} must be tables like [[{key}]], got {quoted(entries)}"
        )
    return entries


def _reference(path: Path, entry: dict[str, Any]) -> Reference:
    return Reference(**_values(path, entry, Reference, where="[[references]] "))


def _values(
    path: Path, table: Mapping[str, Any], cls: type, *, where: str = "", skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The table as keyword arguments of `cls`, each value of the field's type."""
    known = {field.name: field for field in fields(cls) if field.name not in skip}
    for key in table:
        if key not in known:
            raise ValueError(
                f"unknown key {where}{quoted(key)} in {path.name}; allowed are {', '.join(known)}"
            )
    missing = [name for name, f in known.items() if _needed(f) and name not in table]
    if missing:
        raise ValueError(f"{where}{', '.join(missing)} missing in {path.name}; add it")
    return {
        key: _typed(value, str(known[key].type), f"{where}{key} in {path.name}", path.parent)
        for key, value in table.items()
    }


def _needed(field: Field[Any]) -> bool:
    named_otherwise = ("name", "prompt")  # the file's stem; an empty prompt
    return field.default is MISSING and field.name not in named_otherwise


def _typed(value: Any, annotation: str, what: str, folder: Path) -> Any:
    if annotation.startswith("Path"):
        if not isinstance(value, str) or not value:
            raise ValueError(f"{what} must be a path in quotes, got {quoted(value)}")
        return user_path(folder / user_path(value)).resolve()
    if annotation.startswith("tuple[int"):
        if not isinstance(value, list) or [type(x) for x in value] != [int, int, int]:
            raise ValueError(
                f"{what} must be three whole numbers like [0, 1, 2], got {quoted(value)}"
            )
        return tuple(value)
    allowed, words = {
        "int": ((int,), "a whole number"),
        "float": ((int, float), "a number"),
        "bool": ((bool,), "true or false"),
    }.get(annotation, ((str,), "text in quotes"))
    if type(value) not in allowed:  # not isinstance: true is an int to Python
        raise ValueError(f"{what} must be {words}, got {quoted(value)}")
    if annotation != "float":
        return value
    try:
        return float(value)
    except OverflowError as error:  # a whole number of hundreds of digits
        raise ValueError(f"{what} is too large for {words}, got {quoted(value)}") from error


def _lines(data: Any, *, skip: tuple[str, ...] = ()) -> list[str]:
    pairs = ((f.name, getattr(data, f.name)) for f in fields(data) if f.name not in skip)
    return [f"{name} = {_toml(value)}" for name, value in pairs if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # A TOML string is a JSON string, but for DEL, which TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
