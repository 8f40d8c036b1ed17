"""Needed against available, for each resource, with the reason in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app import memory, preflight
from app.estimate import FileFound, Need, Phase, ReferencePlan, Verdict
from app.history import Typical
from app.machine import Gpu, Machine
from runtime.layouts import Layout
from runtime.messages import Plan, Request

TIGHT = 0.9  # of what is there: allocators leave gaps, and the formula may be off by 5 %
_SHOWN = 0.02  # of a GPU: what others take of it is worth a word
_GPU_ENGINE_RAM = 3 << 30  # engine process beside its weights: Python, torch, CUDA
CPU_ENGINE_RAM = 700_000_000  # the same without CUDA
_BYTES_PER_PIXEL = 27  # of a reference in RAM: bytes read, fp32, and fp32 as resized
NOT_COUNTED = "What it needs is not known before its files and references can be read."
_ROUGH = "formula: engine process, largest tensor, references; not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What our own done runs of the same plan and shape class told."""

    typical: Typical | None = None
    peak_bytes: int = 0  # the highest
    peak_runs: int = 0  # runs that told one


def lacking(plan: Plan, machine: Machine) -> str:
    """Which GPUs the machine has not, as a sentence; "" for a plan on the CPU."""
    if plan.device != "cuda":
        return ""
    if not machine.gpus:
        why = machine.reason or "this machine reports none"
        return f"This plan needs a CUDA GPU: {why}."
    ranks = Layout.parse(plan.layout).ranks
    if ranks > len(machine.gpus):
        return f"Layout {plan.layout} needs {ranks} GPUs: this machine has {len(machine.gpus)}."
    return ""


def vram(plan: Plan, machine: Machine, phases: tuple[Phase, ...], past: Past) -> Need:
    """phases: empty when files or references cannot be read."""
    if plan.device != "cuda":
        return Need(what="VRAM", verdict="fits", reason="This plan runs on the CPU.")
    needed, source = _needed(phases, past, outside=memory.CONTEXT_BYTES)
    told = Need(
        what="VRAM", verdict="unknown", reason="", needed=needed, source=source, phases=phases
    )
    if reason := lacking(plan, machine):
        return replace(told, verdict="no", reason=reason)
    ranks = Layout.parse(plan.layout).ranks
    # rank 0 has the text encoder too: what fits there fits on the others, if those are alike
    gpu = min(machine.gpus[:ranks], key=lambda one: one.total or 0)
    if needed is None:
        reason = NOT_COUNTED
        return replace(told, reason=reason, total=gpu.total)
    if gpu.total is None:
        reason = f"It needs about {gib(needed)}; the memory of {gpu.name} is not reported."
        return replace(told, reason=reason)
    free = gpu.total - _others(gpu, machine)
    verdict = _verdict(needed, free)
    reason = _sentence(verdict, needed, _has(gpu, gpu.total - free), free)
    return replace(told, verdict=verdict, reason=reason, available=free, total=gpu.total)


def ram(
    plan: Plan,
    machine: Machine,
    files: Sequence[FileFound],
    references: Sequence[ReferencePlan],
    phases: tuple[Phase, ...],
    past: Past,
) -> Need:
    """Of the engine process; on the CPU that is everything."""
    pictures = sum(r.width * r.height * r.frames for r in references)
    media = _BYTES_PER_PIXEL * pictures
    needed: int | None
    if plan.device == "cuda":
        largest = max((file.largest_bytes for file in files), default=0)
        engines = _GPU_ENGINE_RAM * Layout.parse(plan.layout).ranks
        needed, source = engines + media + 2 * largest, _ROUGH
        if machine.gpus and machine.gpus[0].unified:
            held = max((phase.bytes for phase in phases), default=0)
            needed, source = needed + held, f"{_ROUGH}; the GPU's memory is part of it"
    elif past.peak_runs:
        needed, source = _needed((), past, outside=0)
    else:
        needed = max((phase.bytes for phase in phases), default=None)
        ranks = Layout.parse(plan.layout).ranks
        needed = None if needed is None else ranks * (needed + CPU_ENGINE_RAM) + media
        source = "formula: weights, tensors of the worst phase, engine process; not measured"
    if needed is None or machine.ram_total is None or machine.ram_used is None:
        reason = NOT_COUNTED
        if needed is not None:
            reason = f"It needs about {gib(needed)}; how much RAM is free is not reported."
        return Need(what="RAM", verdict="unknown", reason=reason, needed=needed, source=source)
    ours = (
        machine.engine_loaded and plan.device != "cuda"
    )  # it gives its weights back or keeps them
    free = machine.ram_total - (0 if ours else machine.ram_used)
    verdict = _verdict(needed, free)
    has = f"this machine has {gib(machine.ram_total)} of RAM"
    return Need(
        what="RAM",
        verdict=verdict,
        reason=_sentence(verdict, needed, has, free),
        needed=needed,
        available=free,
        total=machine.ram_total,
        source=source,
        phases=phases if plan.device != "cuda" else (),
    )


def disk(request: Request, free: int) -> Need:
    """Of the runs folder; the bounds of preflight, which a run is refused by."""
    needed = preflight.disk_need(request)
    verdict: Verdict = "no" if needed > free else "tight" if needed > free / 2 else "fits"
    return Need(
        what="disk",
        verdict=verdict,
        reason=_sentence(verdict, needed, f"{gib(free)} are free in the runs folder", free),
        needed=needed,
        available=free,
        source="at most: latents and a noisy picture",
    )


def time(past: Past, *, loaded: bool) -> Need:
    """Only from our own history; loaded: the engine has this plan already."""
    typical = past.typical
    if typical is None:
        reason = "No run of this plan and shape has ended here yet."
        return Need(what="time", verdict="unknown", reason=reason)
    load = 0.0 if loaded else typical.load
    more = f", {load:.0f} s of it to load the plan" if load >= 1 else ""
    reason = f"Like our own runs of this plan and shape{more}."
    return Need(
        what="time", verdict="fits", reason=reason, needed=typical.run + load, source="history"
    )


def gib(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.0f} MiB"


def _needed(phases: tuple[Phase, ...], past: Past, *, outside: int) -> tuple[int | None, str]:
    """A measured peak of our own goes before the formula; outside: bytes that it leaves out."""
    if past.peak_runs:
        runs = "one run" if past.peak_runs == 1 else f"{past.peak_runs} runs"
        return past.peak_bytes + outside, f"measured here in {runs} of this plan and shape"
    if not phases:
        return None, ""
    most = max(phases, key=lambda phase: phase.bytes)
    return most.bytes, f"formula, most of it during {most.name}; may be {memory.ERROR:.0%} off"


def _others(gpu: Gpu, machine: Machine) -> int:
    """Bytes that are not ours to take; while our engine is loaded they cannot be told apart."""
    return 0 if machine.engine_loaded else gpu.used or 0


def _has(gpu: Gpu, taken: int) -> str:
    assert gpu.total is not None
    has = f"{gpu.name} has {gib(gpu.total)}"
    if gpu.unified:
        has += ", shared with the RAM"
    return f"{has}, of which {gib(taken)} are taken" if taken > _SHOWN * gpu.total else has


def _verdict(needed: float, free: float) -> Verdict:
    if needed > free:
        return "no"
    return "tight" if needed > TIGHT * free else "fits"


def _sentence(verdict: Verdict, needed: float, has: str, free: float) -> str:
    if verdict == "no":
        return f"It needs about {gib(needed)} and {has}: {gib(needed - free)} too little."
    left = f": only {gib(free - needed)} would be left" if verdict == "tight" else ""
    return f"It needs about {gib(needed)} and {has}{left}."
