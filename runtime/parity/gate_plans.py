"""The plans of a gate: what P is held against, and one P for every lossy backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from runtime.caches import CACHES
from runtime.h3.load import DTYPES
from runtime.kernels.attention import BACKENDS as ATTENTION
from runtime.kernels.attention import load_attention
from runtime.kernels.attention.base import AttentionOptions
from runtime.kernels.elementwise import BACKENDS as ELEMENTWISE
from runtime.kernels.linear import BACKENDS as LINEAR
from runtime.kernels.linear import linear_backend
from runtime.kernels.unavailable import Unavailable
from runtime.messages import KJ_MODES, Plan
from runtime.parity.gate_classes import BACKEND_FIELDS, EXACT, class_of
from runtime.parity.gate_ranks import on_one_device
from runtime.parity.plans import read_plan

_BOOLS = {"true": True, "false": False}
# what computes the same without the loss
_EXACT = {
    "dense": "dense",
    "nvfp4": "nvfp4_dequant",
    "fp8": "fp8_dequant",
    "int8": "int8_dequant",
    "elementwise": "eager",
    "cache": "off",
}

# options of a backend; a short request is mostly conditioning, with sinks nearly exact in Sol
_VARIANTS: dict[str, Sequence[dict[str, str]]] = {
    "sol": ({}, {"sol_sinks": "none"}),
    "sol_nvlabs": ({}, {"sol_sinks": "none"}),
    "kj": [{"kj_mode": mode} for mode in KJ_MODES],
}


def default_plan() -> Plan:
    """Preset cpu in bf16: the lossy attention kernels take half types only."""
    return replace(read_plan("cpu"), name="cpu, bf16", dtype="bf16")


def dtype_of(plan: Plan) -> torch.dtype:
    """The compute dtype of its denoiser."""
    return DTYPES[plan.dtype]


def exact(plan: Plan) -> Plan:
    """The plan on one device without lossy linears and caches; attention stays."""
    return on_one_device(replace(plan, **_EXACT))  # type: ignore[arg-type]


def changed(plan: Plan, settings: Sequence[str]) -> Plan:
    """The plan with FIELD=VALUE laid over it; ValueError for a field or a value it has not."""
    types = {field.name: str(field.type) for field in fields(Plan)}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name in ("name", "models") or name not in types:
            raise ValueError(
                f"--set {setting}: give FIELD=VALUE with a field of a plan, as attention=fa4"
            )
        try:
            value = _typed(text, types[name])
        except (ValueError, KeyError) as error:
            raise ValueError(f"--set {setting}: {name} must be {types[name]}") from error
        plan = replace(plan, **{"name": f"{plan.name}, {setting}", name: value})
    return plan


def _typed(text: str, type: str) -> Any:
    if type == "bool":
        return _BOOLS[text]
    return {"int": int, "float": float}.get(type, str)(text)


def pairs(base: Plan, only: Sequence[str] = ()) -> list[tuple[Plan, Plan]]:
    """(P, Q) for every lossy backend: attention against sage2, sage2 and all others against sdpa.

    Where sage2 cannot run here, all are held against sdpa. only: names to take, () for all.
    """
    plain = exact(replace(base, attention="sdpa"))
    known = [name for _, name in lossy()]
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: the lossy backends are {', '.join(known)}")
    found = []
    for field, name in lossy():
        if getattr(plain, field) == name or (only and name not in only):
            continue  # see alone()
        for options in _VARIANTS.get(name, ({},)):
            said = " ".join([field, name, *options.values()])
            p = replace(plain, **{"name": said, field: name, **options})  # type: ignore[arg-type]
            found.append((p, _reference(plain, p, field)))
    return found


def alone() -> list[str]:
    """Lossy backends without an exact one for the same layers: nothing to hold them against."""
    plain = exact(default_plan())
    return [name for field, name in lossy() if getattr(plain, field) == name]


def lossy() -> Iterator[tuple[str, str]]:
    """(plan field, backend) of every backend whose class is not exact."""
    for field, names in by_field().items():
        for name in names:
            if class_of(field, name).name != EXACT:
                yield field, name


def by_field() -> dict[str, Sequence[str]]:
    """Backends that a plan field may name."""
    found: dict[str, Sequence[str]] = {"attention": ATTENTION, "cache": CACHES}
    for field, stored in BACKEND_FIELDS.items():
        if stored:
            found[field] = [name for name in LINEAR if stored in linear_backend(name).formats]
    return {**found, "elementwise": ELEMENTWISE}


def baseline(plan: Plan) -> tuple[Plan, str]:
    """The plan that `plan` is held against, and why that is not sage2 ("" if it is).

    The correctness baseline is SageAttention 2; its own is SDPA.
    """
    plain, reason = exact(plan), sage2_refusal(plan)
    attention = "sdpa" if reason else "sage2"
    return replace(plain, name=attention, attention=attention), reason


def sage2_refusal(plan: Plan) -> str:
    """Why sage2 cannot be the reference of this plan here; "" if it can."""
    if plan.attention == "sage2":
        return "it is what is compared"
    try:
        load_attention("sage2", torch.device(plan.device), dtype_of(plan), AttentionOptions())
    except Unavailable as error:
        return error.reason
    return ""


def _reference(plain: Plan, p: Plan, field: str) -> Plan:
    if field != "attention" or p.attention == "sage2":
        return replace(plain, name="sdpa")
    found, reason = baseline(p)
    return replace(found, name=f"sdpa (sage2 cannot run here: {reason})") if reason else found
