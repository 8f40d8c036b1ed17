"""The checkpoint files of a plan, looked at by their headers only."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from app import families, memory
from app.estimate import FileFound
from runtime.checkpoints.classify import Part, classify
from runtime.checkpoints.header import CheckpointError, read_header
from runtime.checkpoints.modes import KNOWN_MODELS
from runtime.layouts import Layout, check_heads
from runtime.ltx.census import ROLE as LTX_ROLE
from runtime.ltx.census import Census, read_census
from runtime.ltx.folders import check_role, weight_files
from runtime.ltx.orders import problem_of
from runtime.ltx.text_folder import check_text_folder
from runtime.messages import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """files: one per role. parts: by role, those that can be loaded."""

    files: tuple[FileFound, ...]
    parts: Mapping[str, Part]

    @property
    def mode(self) -> str:
        """ref2va, fl2va or unknown, as presets/known_models.toml has learnt it."""
        return self.parts["dit"].mode if "dit" in self.parts else "unknown"


def denoiser_problem(plan: Plan) -> str:
    """Why the denoiser's file cannot be used, "" if it can."""
    return _look(plan, "dit", plan.models.dit)[1].problem


def unreadable(path: Path, error: OSError, plan: Plan) -> str:
    """A sentence on a file or folder that is there, or may be, and cannot be looked at."""
    reason = (error.strerror or str(error)).lower()
    return (
        f"{error.filename or path} cannot be read ({reason}); allow it to the user of this program "
        f"or change [models] in plan {plan.name}"
    )


def look(plan: Plan) -> Models:
    """What is there; a file that cannot be used carries its problem."""
    files: list[FileFound] = []
    parts: dict[str, Part] = {}
    folders = families.of_plan(plan).folders
    for role, path in families.paths(plan).items():
        if path is None:
            told = f"plan {plan.name} names no {role}; add it to [models]"
            files.append(FileFound(role=role, name="", path="", problem=told))
            continue
        if role in folders:
            denoiser = None if files[0].problem else plan.models.dit  # which the folders must fit
            try:
                files.append(_look_into(plan, role, path, denoiser))
            except OSError as error:
                blank = FileFound(role=role, name=path.name, path=str(path))
                files.append(_with(blank, unreadable(path, error, plan)))
            continue
        part, found = _look(plan, role, path)
        files.append(found)
        if part is not None and not found.problem:
            parts[role] = part
    return Models(files=tuple(files), parts=parts)


def _look_into(plan: Plan, role: str, path: Path, denoiser: Path | None) -> FileFound:
    """A folder of LTX as diffusers and transformers write it."""
    described = (path / "config.json").is_file()
    weights = weight_files(path) if described else []
    blank = FileFound(role=role, name=path.name, path=str(path))
    if not weights:
        lacks = "no .safetensors file" if described else "no config.json"
        todo = "put a folder of that layout there or change [models] in the plan"
        return _with(blank, f"{path} has {lacks}, which plan {plan.name} needs; {todo}")
    problem = "" if denoiser is None else _folder_problem(plan, role, path, denoiser)
    size = sum(file.stat().st_size for file in weights if file.exists())  # not of a dead link
    held = 0 if problem else size
    return replace(
        blank, bytes=size, family="folder", stored="", resident_bytes=held, problem=problem
    )


def _folder_problem(plan: Plan, role: str, path: Path, denoiser: Path) -> str:
    """Why the engine would not load the folder beside this denoiser, by config.json and headers."""
    try:
        state = denoiser.stat()
        census = _census(denoiser, state.st_mtime_ns, state.st_size)
        if role == "text_encoder":
            tokenizer = plan.models.tokenizer
            check_text_folder(path, tokenizer, census.config, census.gemma_version)
        else:
            check_role(role, path, census.config.in_channels)
    except ValueError as error:
        return f"{error}; change [models] in plan {plan.name}"
    return ""


def _look(plan: Plan, role: str, path: Path) -> tuple[Part | None, FileFound]:
    blank = FileFound(role=role, name=path.name, path=str(path))
    try:
        state = path.stat()
        known = KNOWN_MODELS.stat().st_mtime_ns if KNOWN_MODELS.exists() else 0
        wanted = families.of_plan(plan).parts.get(role, role)
        part = _part(path, wanted, state.st_mtime_ns, state.st_size, known)
        if wanted == "dit" and not part.problem:
            check_heads(Layout.parse(plan.layout), part.dims["heads"])
        if wanted == LTX_ROLE and not part.problem:
            told = _ltx_problem(path, plan.ltx_nvfp4_order, state.st_mtime_ns, state.st_size)
            part = replace(part, problem=told)
    except FileNotFoundError:
        make = f"; {make}" if (make := families.of_plan(plan).make) else ""
        problem = f"{path} is not there; put the file there or change [models] in the plan{make}"
        return None, _with(blank, problem)
    except OSError as error:
        return None, _with(blank, unreadable(path, error, plan))
    except ValueError as error:
        return None, _with(blank, str(error))
    largest = max((tensor.bytes for tensor in part.tensors), default=0)
    return part, FileFound(
        role=role,
        name=path.name,
        path=str(path),
        bytes=state.st_size,
        family=part.family,
        stored=_stored(part),
        resident_bytes=0 if part.problem else memory.resident(part, plan),
        largest_bytes=largest,
        problem=part.problem,
    )


@functools.lru_cache(maxsize=64)
def _part(path: Path, role: str, changed: int, size: int, known: int) -> Part:
    """One model of a file; the last three only tell whether it is still the same."""
    del changed, size, known
    header = read_header(path)
    parts = {part.role: part for part in classify(header).parts}
    if role not in parts:
        holds = ", ".join(part.family for part in parts.values())
        named = role.removeprefix("ltx_")
        raise CheckpointError(
            f"{path} holds {holds}, the plan names it as its {named}; change [models] in the plan"
        )
    return parts[role]


@functools.lru_cache(maxsize=8)
def _census(path: Path, changed: int, size: int) -> Census:
    """Of a denoiser that has no problem."""
    del changed, size
    return read_census(read_header(path))


@functools.lru_cache(maxsize=64)
def _ltx_problem(path: Path, order: str, changed: int, size: int) -> str:
    """Whether the file is what its own header's config asks for, and its NVFP4 order is known."""
    del changed, size
    return problem_of(read_header(path), order)


def _stored(part: Part) -> str:
    """ "nvfp4 in 200 layers, the rest BF16, F32"."""
    packed = [f"{quant.format} in {quant.layers} layers" for quant in part.quantised]
    rest: Counter[str] = Counter()
    for tensor in part.tensors:
        if not tensor.quant and tensor.role != "marker":
            rest[tensor.dtype] += tensor.bytes
    plain = ", ".join(name for name, _ in rest.most_common())
    return f"{', '.join(packed)}, the rest {plain}" if packed else plain


def _with(blank: FileFound, problem: str) -> FileFound:
    return replace(blank, problem=problem)
