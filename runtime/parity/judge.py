"""Replays one golden in this process and decides whether it is bit-equal, passes or fails."""

from __future__ import annotations

import importlib
import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from runtime.kernels.unavailable import Unavailable
from runtime.parity.golden import Golden
from runtime.parity.limits import Limit, limit_of
from runtime.parity.metrics import Comparison, Unsupported
from runtime.parity.replay import KINDS, NO_CHECKPOINTS
from runtime.parity.report import CaseResult, Detail, number

CPU = torch.device("cpu")


def replay_case(path: Path, checkpoints: Path, cpu: str, device: torch.device = CPU) -> CaseResult:
    """Replay one file; an error is a FAIL of this case and of no other.

    cpu: what runtime.parity.cpu.pin() answered, for the report. device: elsewhere than on the CPU
    only the free run is made.
    """
    started = time.perf_counter()
    golden: Golden | None = None
    comparisons: Sequence[Comparison] = ()
    status, reason = "", ""
    try:
        golden = Golden(path)
        comparisons = _replay(golden, checkpoints, device)
        unread = _unread(golden, comparisons) if device.type == "cpu" else []
        if unread:
            status, reason = "unsupported", f"stored but not compared: {_some(unread)}"
    except (Unsupported, Unavailable) as error:
        status, reason = "unsupported", str(error)
    except Exception as error:  # whatever a replay raises is this case's failure
        status, reason = "FAIL", _described(error)
    return _result(
        golden.case if golden else path.stem,
        path,
        _judged(golden, comparisons) if golden else [],
        status,
        reason,
        time.perf_counter() - started,
        cpu,
    )


def _replay(golden: Golden, checkpoints: Path, device: torch.device) -> Sequence[Comparison]:
    if golden.kind not in KINDS:
        raise Unsupported(f"golden kind {golden.kind!r}; known: {', '.join(KINDS)}")
    if golden.kind not in NO_CHECKPOINTS and not checkpoints.is_dir():
        raise ValueError(
            f"there is no folder {checkpoints}; name the folder of the tiny checkpoints with "
            "--checkpoints"
        )
    module = importlib.import_module(KINDS[golden.kind].module)
    with torch.inference_mode():
        found: Sequence[Comparison] = module.replay(golden, checkpoints, device)
    if not found:
        raise ValueError("nothing was compared")
    return found


def _unread(golden: Golden, comparisons: Sequence[Comparison]) -> list[str]:
    """Stored tensors that no comparison covers, and given ones that the replay never looked at."""
    covered = {c.name for c in comparisons}
    kind = KINDS[golden.kind]
    given = {n for n in golden.read if re.fullmatch(kind.given, n)}
    spare = {n for n in golden.names if re.fullmatch(kind.spare, n)}
    return sorted(golden.names - covered - given - spare)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _described(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _judged(
    golden: Golden, comparisons: Sequence[Comparison]
) -> list[tuple[Comparison, Limit | None]]:
    return [(c, limit_of(golden, c)) for c in comparisons]


def _result(
    case: str,
    path: Path,
    judged: list[tuple[Comparison, Limit | None]],
    status: str,
    reason: str,
    seconds: float,
    cpu: str,
) -> CaseResult:
    different = [c for c, _ in judged if not c.equal]
    beyond = [c for c, limit in judged if not _passes(c, limit)]
    if beyond and status != "FAIL":
        status = "FAIL"
    if not status:
        gated = any(limit is not None for _, limit in judged)
        status = "bit-equal" if not different else "pass" if gated else "info"
    first = _first(beyond or different)
    return CaseResult(
        case=case,
        path=str(path),
        status=status,
        compared=len(judged),
        equal=len(judged) - len(different),
        first=_named(first) if first else "",
        max_abs=first.max_abs if first else 0.0,
        relative_l2=first.relative_l2 if first else 0.0,
        reason=reason,
        seconds=seconds,
        cpu=cpu,
        details=[_detail(c, limit) for c, limit in judged],
    )


def _passes(c: Comparison, limit: Limit | None) -> bool:
    if c.equal or c.problem:
        return c.equal
    return limit is None or (c.relative_l2 <= limit.relative_l2 and c.max_abs <= limit.max_abs)


def _first(different: list[Comparison]) -> Comparison | None:
    """Staged before free: a staged difference names the stage that is wrong by itself."""
    staged = [c for c in different if c.run == "staged"]
    return next(iter(staged or different), None)


def _named(c: Comparison) -> str:
    problem = f" ({c.problem})" if c.problem else ""
    return f"{c.run} {c.stage}: {c.name}{problem}"


def _detail(c: Comparison, limit: Limit | None) -> Detail:
    return {
        "name": c.name,
        "run": c.run,
        "stage": c.stage,
        "equal": c.equal,
        "max_abs": number(c.max_abs),
        "relative_l2": number(c.relative_l2),
        "limit_relative_l2": None if limit is None else number(limit.relative_l2),
        "limit_max_abs": None if limit is None else number(limit.max_abs),
        "problem": c.problem,
    }
