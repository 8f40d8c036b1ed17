"""What a gate found, as JSON: for `--json`, for the page and for the console."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from runtime.machine import machine
from runtime.messages import Plan
from runtime.parity.gate_classes import BACKEND_FIELDS, OPTIONS
from runtime.parity.gate_judge import FAILED, IDLE, PASSED, STREAMS, UNAVAILABLE, Verdict
from runtime.parity.report import number

GATED = (
    "gated: relative L2 of the network's velocity, P evaluated at Q's x and sigma; "
    "shown: the denoised (at a small sigma it hides errors) and the final latents of free runs"
)
EXIT_FAILED, EXIT_NO_VERDICT = 1, 2


def exit_status(verdicts: Sequence[Verdict]) -> int:
    """1 if any failed; 0 if one passed; else 2: a script must not read "not run" as passed."""
    found = {verdict.status for verdict in verdicts}
    if FAILED in found:
        return EXIT_FAILED
    return 0 if PASSED in found else EXIT_NO_VERDICT


def document(p: Plan, q: Plan, verdicts: Sequence[Verdict], note: str) -> dict[str, Any]:
    """One pair of plans; `backends` are those that the console shows the verdict at."""
    told, chosen = machine(), _evaluated(fields_of(p, q), verdicts)
    return {
        "kind": "gate",
        "when": time.time(),
        "device": _device(p),
        "machine": asdict(told),
        "plan": {k: str(v) for k, v in asdict(p).items() if k != "models"},
        "against": {k: str(v) for k, v in asdict(q).items() if k != "models"},
        "note": note,
        "gated": GATED,
        "fields": chosen,
        "backends": [str(getattr(p, name)) for name in chosen],
        "options": options_of(p, chosen),
        "against_backends": [str(getattr(q, name)) for name in chosen],
        "against_name": q.name,
        "classes": sorted({c for v in verdicts if v.limits for c in v.limits.classes}),
        **summary(verdicts),
        "results": [_plain(verdict) for verdict in verdicts],
    }


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Verdict over all cases, and the worst figures."""
    told = [v for v in verdicts if v.steps]
    untold = UNAVAILABLE if any(v.status == UNAVAILABLE for v in verdicts) else IDLE
    status = {0: "passed", EXIT_FAILED: "failed", EXIT_NO_VERDICT: untold}
    return {
        "exit": exit_status(verdicts),
        "status": status[exit_status(verdicts)],
        "cases": len(verdicts),
        "failed": [v.case for v in verdicts if v.status == FAILED],
        "reason": next((v.reason for v in verdicts if v.status == UNAVAILABLE), ""),
        "worst": {s: number(max((v.worst(s) for v in told), default=0.0)) for s in STREAMS},
        "share": {s: number(max((_share(v, s) for v in told), default=0.0)) for s in STREAMS},
    }


def options_of(p: Plan, chosen: Sequence[str]) -> list[str]:
    """["kj_mode fp8_cuda"]: options of the chosen fields' backends that are not the default ones.

    Q may share them: they say which P this was.
    """
    usual = {field.name: field.default for field in fields(Plan)}
    return [
        f"{name} {getattr(p, name)}"
        for name, field in OPTIONS.items()
        if field in chosen and getattr(p, name) != usual[name]
    ]


def fields_of(p: Plan, q: Plan) -> list[str]:
    """The fields that name a backend, where P has another, or another option of it, than Q."""
    differ = [name for name in asdict(p) if getattr(p, name) != getattr(q, name)]
    named = dict.fromkeys(OPTIONS.get(name, name) for name in differ)
    return [name for name in named if name in BACKEND_FIELDS]


def _evaluated(named: list[str], verdicts: Sequence[Verdict]) -> list[str]:
    """Those that some evaluated case's checkpoint uses, else some case's, else all: the others'
    verdict says nothing of them.

    A baseline has the exact backend of every stored format, whatever the file holds.
    """
    told = [verdict for verdict in verdicts if verdict.steps] or verdicts
    changed = {name.split()[0] for verdict in told for name in verdict.changed}
    used = {OPTIONS.get(name, name) for name in changed}
    return [name for name in named if name in used] if used else named


def _share(verdict: Verdict, stream: str) -> float:
    assert verdict.limits is not None
    return verdict.worst(stream) / verdict.limits.of[stream]


def _device(plan: Plan) -> str:
    if plan.device != "cuda":
        return plan.device
    return torch.cuda.get_device_name()


def _plain(verdict: Verdict) -> dict[str, Any]:
    """JSON has no infinities and no NaN."""

    def clean(value: Any) -> Any:
        if isinstance(value, float):
            return number(value)
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return value

    plain: dict[str, Any] = clean(asdict(verdict))
    return plain
