"""What a parity run says: one line per case, one JSON object at the end, every figure in --json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.media.files import write_json_atomic

_WIDTHS = "{:<50} {:<11} {:>9} {:>9} {:>9} {:>6}  {}"
_PASSED = ("bit-equal", "pass", "info")

Detail = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. status: bit-equal | pass | info (differs, nothing is gated) | FAIL | unsupported.

    `first` names the first tensor beyond its limit, else the first one that differs.
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


def finish(results: Sequence[CaseResult], *, at_least: int, out: Path | None) -> int:
    """Print the summary as the last line; exit status 0 only if every case passes."""
    bad = [r.case for r in results if r.status == "FAIL"]
    unsupported = [r.case for r in results if r.status == "unsupported"]
    bit_equal = sum(r.status == "bit-equal" for r in results)
    summary = {
        "cases": len(results),
        "passed": sum(r.status in _PASSED for r in results),
        "bit_equal": bit_equal,
        "failed": bad,
        "unsupported": unsupported,
        "cpu": ", ".join(sorted({r.cpu for r in results})),
    }
    if out is not None:
        write_json_atomic(out, {**summary, "results": [_document(r) for r in results]})
    too_few = bit_equal < at_least
    if too_few:
        print(f"only {bit_equal} cases are bit-equal, at least {at_least} were asked for")
    print(json.dumps(summary))
    return int(bool(bad or unsupported) or too_few)


def number(value: float) -> float | None:
    """JSON has no infinities and no NaN: those become null."""
    return value if math.isfinite(value) else None


def _document(result: CaseResult) -> dict[str, object]:
    return {
        "case": result.case,
        "path": result.path,
        "status": result.status,
        "reason": result.reason,
        "first": result.first,
        "compared": result.compared,
        "equal": result.equal,
        "seconds": round(result.seconds, 3),
        "details": list(result.details),
    }
