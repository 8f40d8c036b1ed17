"""What a benchmark's child is told, and what one turn of it tells back."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from runtime.checkpoints.demo import random_checkpoint
from runtime.checkpoints.file import IndexedCheckpoint, open_file
from runtime.checkpoints.published import FORMATS
from runtime.clock import DENOISE, END_TO_END
from runtime.layouts import Layout
from runtime.messages import ModelFiles, Plan, Ref2VARequest, Reference, StageTime
from runtime.meter import ALL_COMMUNICATION, PARTS, Ranges, unnamed

SIZES = ("full", "tiny")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One subject and what it is to do in each turn, whatever its family."""

    subject: str  # plan | diffusers
    plan: Plan
    text_rows: int  # random conditioning of so many words; 0: the request's own
    weights: str  # "SIZE:FORMAT" of random weights; "": the plan's files
    media: bool  # a turn of the request's own conditioning writes an mp4
    out: Path  # where such turns keep what they write; Path(): it is removed
    attention: str  # of diffusers
    scratch: Path = Path()  # of temporary files, removed by whoever made it; Path(): the system's


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Work):
    """Of H3: with text rows there is one picture beside the words."""

    request: Ref2VARequest
    decode: bool  # each turn also decodes what it sampled

    @property
    def kind(self) -> str:
        """Which subject runs it, of runtime.bench.__main__."""
        several = self.subject == "plan" and Layout.parse(self.plan.layout).ranks > 1
        return "ranks" if several else self.subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds and bytes of one turn; bytes of the device, on the CPU of the process."""

    seconds: float  # all of it, on the CPU's clock
    steps: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]  # of each step
    stages: Mapping[str, float]  # all but the steps
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    rank_peak_bytes: tuple[int, ...] = ()  # allocated, of each of several ranks
    rank_parts: tuple[Mapping[str, tuple[float, ...]], ...] = ()  # `parts` of each of them


class Subject(Protocol):
    """Something loaded that can take turns; the first is the warm-up."""

    facts: Mapping[str, Any]

    @property
    def rows(self) -> object:
        """S of H3, 0: not known before the first turn; of LTX a ltx_base.Size of each stage."""

    def turn(self) -> Turn:
        """Returns once the device has done it all."""

    def profile(self) -> Mapping[str, Any]:
        """One step under the profiler; ValueError where there is no GPU."""

    def close(self) -> None:
        """The last call, where all went well; RuntimeError for processes of its own that failed."""


class OneProcess:
    """What subjects without other ranks have in common."""

    def close(self) -> None:
        """Nothing is left to end."""


def setup_of(told: Mapping[str, Any]) -> Setup:
    """The setup of H3 from its JSON."""
    request = dict(told["request"])
    request["references"] = tuple(_reference(one) for one in request["references"])
    return Setup(**work_of(told), request=Ref2VARequest(**request), decode=told["decode"])


def work_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """What setups of all families have, by field."""
    plan = dict(told["plan"])
    files = dict(plan["models"])
    layers = files.pop("deepstack_layers")
    paths = {role: None if path is None else Path(path) for role, path in files.items()}
    plan["models"] = ModelFiles(deepstack_layers=tuple(layers), **paths)  # type: ignore[arg-type]
    return {
        "subject": told["subject"],
        "plan": Plan(**plan),
        "text_rows": told["text_rows"],
        "weights": told["weights"],
        "media": told["media"],
        "out": Path(told["out"]),
        "attention": told["attention"],
        "scratch": Path(told.get("scratch", "")),
    }


def _reference(told: Mapping[str, Any]) -> Reference:
    paths = {name: None if told[name] is None else Path(told[name]) for name in _PATHS}
    return Reference(**{**told, **paths})


_PATHS = ("path", "soundtrack")


def opener(weights: str) -> Callable[[Path, str], IndexedCheckpoint]:
    """How a checkpoint is opened: the file itself, or the random one of "SIZE:FORMAT".

    The format is the denoiser's; the other models come in the default format of that size. A random
    one has the stored types of the format and is made on the device that asks, from one seed.
    ValueError lists the sizes and formats.
    """
    if not weights:
        return open_file
    size, _, dit = weights.partition(":")
    if size not in SIZES or dit not in FORMATS[size]["dit"]:
        known = "; ".join(f"{s}: {', '.join(FORMATS[s]['dit'])}" for s in SIZES)
        raise ValueError(f"random weights must be SIZE:FORMAT of {known}; got {weights!r}")

    def opened(path: Path, role: str) -> IndexedCheckpoint:
        del path
        stored = dit if role == "dit" else FORMATS[size][role][0]
        return random_checkpoint(role, size=size, format=stored)

    return opened


@contextmanager
def folder_of(work: Work, turn: int) -> Iterator[Path]:
    """Of one turn; a temporary one is removed after the time has been taken."""
    if work.out != Path():
        folder = work.out / f"turn_{turn}"
        folder.mkdir(parents=True)
        yield folder
        return
    place = None if work.scratch == Path() else work.scratch
    with tempfile.TemporaryDirectory(prefix="h3-bench-", dir=place) as made:
        yield Path(made)


def turn_of(times: tuple[StageTime, ...], seconds: float, allocated: int, reserved: int) -> Turn:
    """Stages summed by name; steps and their parts in order."""
    stages: dict[str, float] = {}
    parts: dict[str, list[float]] = {}
    for one in times:
        if one.step >= 0 and one.stage in (*PARTS, ALL_COMMUNICATION):
            parts.setdefault(one.stage, []).append(one.seconds)
        elif one.stage not in (DENOISE, END_TO_END):
            stages[one.stage] = stages.get(one.stage, 0.0) + one.seconds
    return Turn(
        seconds=seconds,
        steps=tuple(one.seconds for one in times if one.stage == DENOISE),
        parts={name: tuple(values) for name, values in parts.items()},
        stages=stages,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
    )


def named(device: torch.device) -> Ranges:
    """NVTX ranges, for nsys; on the CPU nothing listens."""
    return torch.cuda.nvtx.range if device.type == "cuda" else unnamed


def peak_of_process() -> int:
    """Most memory that this process had, since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved_bytes(device: torch.device) -> int:
    """Most that the allocator held since the last reset, or holds now."""
    if device.type != "cuda":
        return 0
    return max(torch.cuda.max_memory_reserved(device), torch.cuda.memory_reserved(device))
