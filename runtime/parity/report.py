"""What a parity run says: one line per case, one JSON object at the end, every figure in --json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.media.files import write_json_atomic

_WIDTHS = "{:<50} {:<11} {:>9} {:>9} {:>9} {:>6}  {}"
_PASSED = ("bit-equal", "pass", "info")

Detail = dict[str, object]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. status: bit-equal | pass | info (differs, nothing is gated) | FAIL | unsupported.

    `first` names the first tensor beyond its limit, else the first one that differs.
    `divergence`: the same per run ("free", "staged"), with step, stage, figures and limit.
    """

    case: str
    path: str
    status: str
    compared: int = 0
    equal: int = 0
    first: str = ""
    max_abs: float = 0.0  # of the first differing tensor
    relative_l2: float = 0.0
    reason: str = ""
    seconds: float = 0.0
    cpu: str = ""
    details: Sequence[Detail] = field(default_factory=tuple)
    divergence: Document = field(default_factory=dict)
    settings: Sequence[Mapping[str, str]] = ()  # field, value, from: golden | plan
    frames: Document | None = None  # what --dump wrote for it


def heading() -> str:
    """The table's first line."""
    return _WIDTHS.format("case", "status", "equal", "max abs", "rel L2", "s", "first difference")


def line(result: CaseResult) -> str:
    """One case in one line."""
    figures = (f"{result.max_abs:.2e}", f"{result.relative_l2:.2e}") if result.first else ("", "")
    said = "; ".join(part for part in (result.first, result.reason) if part)
    return _WIDTHS.format(
        result.case,
        result.status,
        f"{result.equal}/{result.compared}",
        *figures,
        f"{result.seconds:.1f}",
        said,
    ).rstrip()


def summarise(results: Sequence[CaseResult]) -> Document:
    """How many cases, how many of them passed, and which did not."""
    return {
        "cases": len(results),
        "passed": sum(r.status in _PASSED for r in results),
        "bit_equal": sum(r.status == "bit-equal" for r in results),
        "failed": [r.case for r in results if r.status == "FAIL"],
        "unsupported": [r.case for r in results if r.status == "unsupported"],
        "cpu": ", ".join(sorted({r.cpu for r in results})),
    }


def write_report(out: Path, results: Sequence[CaseResult], facts: Document) -> None:
    """Every figure of every case; facts: what the whole run had in common."""
    documents = [{**outline(r), "details": list(r.details)} for r in results]
    write_json_atomic(out, {**summarise(results), **facts, "results": documents})


def exit_status(results: Sequence[CaseResult], *, at_least: int) -> int:
    """0 only if every case passes and enough of them are bit-equal."""
    found = summarise(results)
    too_few = found["bit_equal"] < at_least
    return int(bool(found["failed"] or found["unsupported"]) or too_few)


def finish(results: Sequence[CaseResult], *, at_least: int) -> int:
    """Print the summary as the last line; the exit status."""
    found = summarise(results)
    if found["bit_equal"] < at_least:
        print(f"only {found['bit_equal']} cases are bit-equal, at least {at_least} were asked for")
    print(json.dumps(found))
    return exit_status(results, at_least=at_least)


def ending(result: CaseResult) -> Document:
    """One case in a few words, for an event: well under the 4 KiB that a pipe takes at once."""
    return {
        "status": result.status,
        "first": result.first[:400],
        "reason": result.reason[:800],
        "compared": result.compared,
        "equal": result.equal,
        "seconds": round(result.seconds, 3),
    }


def outline(result: CaseResult) -> Document:
    """One case without its tensors."""
    return {
        "case": result.case,
        "path": result.path,
        "status": result.status,
        "reason": result.reason,
        "first": result.first,
        "divergence": result.divergence,
        "compared": result.compared,
        "equal": result.equal,
        "seconds": round(result.seconds, 3),
        "cpu": result.cpu,
        "settings": list(result.settings),
        "frames": result.frames,
    }


def number(value: float) -> float | None:
    """JSON has no infinities and no NaN: those become null."""
    return value if math.isfinite(value) else None
