"""Which limit class a backend is held to, and where its numbers come from (presets/gate.toml)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from runtime.checkpoints.base import UNQUANTISED
from runtime.messages import Plan

PRESETS = Path(__file__).parents[2] / "presets"
EXACT = "exact"
# plan field -> the stored format whose layers it runs; "" where it is used whatever the file holds
BACKEND_FIELDS = {
    "attention": "",
    "dense": UNQUANTISED,
    "nvfp4": "nvfp4",
    "fp8": "float8_e4m3fn",
    "int8": "int8_tensorwise",
    "elementwise": "",
    "cache": "",
}
NO_BACKEND = ("off", "dense")  # values of those fields that name none
# options of a backend -> the field that names it
OPTIONS = {
    "sol_tau": "attention",
    "sol_sinks": "attention",
    "kj_mode": "attention",
    "cache_threshold": "cache",
    "cache_warmup": "cache",
    "cache_max_run": "cache",
}
# fields that touch no evaluation of the denoiser
OUTSIDE = (
    "name",
    "models",
    "video_vae_dtype",
    "vae_blend",
    "vae_attention",
    "vae_tiles",
    "text_encoder",
    "threads",
    "kernel_times",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateClass:
    """One class: `factor` x the yardstick's own distance, or the fixed limit of the dtype."""

    name: str
    help: str
    factor: float
    cpu: Sequence[str]  # yardstick backends of attention, the first that can run is taken
    cuda: Sequence[str]
    bf16: float
    fp32: float
    source: str

    def yardsticks(self, device: str) -> Sequence[str]:
        """Of that kind of device."""
        return self.cuda if device == "cuda" else self.cpu

    def fixed(self, dtype: str) -> float:
        """Where no yardstick can run."""
        return self.fp32 if dtype == "fp32" else self.bf16


@functools.cache
def table() -> Mapping[str, Any]:
    """presets/gate.toml, which does not change while the program runs."""
    return tomllib.loads((PRESETS / "gate.toml").read_text(encoding="utf-8"))


@functools.cache
def classes() -> Mapping[str, GateClass]:
    """By name, from presets/gate.toml."""
    return {name: GateClass(name=name, **entry) for name, entry in table()["class"].items()}


def guidance() -> float:
    """How much more a fixed limit allows where a negative side multiplies the noise."""
    factor: float = table()["guidance"]
    return factor


@functools.cache
def backends() -> Mapping[str, Mapping[str, str]]:
    """presets/backends.toml: help, lossy, gate of every backend."""
    table = tomllib.loads((PRESETS / "backends.toml").read_text(encoding="utf-8"))
    found: Mapping[str, Mapping[str, str]] = table["backend"]
    return found


def class_of(field: str, backend: str, kj_mode: str = "auto") -> GateClass:
    """The class of what a plan field names; ValueError for a backend without one."""
    name = table()["field"].get(field) or backends().get(backend, {}).get("gate", "")
    if backend == "kj":
        name = table()["kj_mode"].get(kj_mode, name)
    if name not in classes():
        known = ", ".join(classes())
        raise ValueError(
            f"backend {backend} has gate class {name!r} in presets/backends.toml; give it {known}"
        )
    return classes()[name]


def differing(p: Plan, q: Plan, formats: frozenset[str]) -> tuple[str, ...]:
    """Fields by which an evaluation of P can differ from Q's on a file with these formats."""
    found = []
    for field in fields(Plan):
        name = field.name
        if name in OUTSIDE or getattr(p, name) == getattr(q, name):
            continue
        stored = BACKEND_FIELDS.get(name, "")
        if not stored or stored in formats:
            found.append(name)
    return tuple(found)


def classes_of(p: Plan, q: Plan, changed: Sequence[str]) -> tuple[GateClass, ...]:
    """The lossy classes of both sides of the differing fields, P's first; exact if there is none.

    A class comes twice if both sides have it: two independent errors.
    """
    named = dict.fromkeys(OPTIONS.get(name, name) for name in changed)
    held = [
        class_of(field, value, plan.kj_mode)
        for plan in (p, q)
        for field in named
        if field in BACKEND_FIELDS and (value := str(getattr(plan, field))) not in NO_BACKEND
    ]
    lossy = tuple(one for one in held if one.name != EXACT)
    return lossy or (classes()[EXACT],)
