"""Replays one golden in this process and decides whether it is bit-equal, passes or fails."""

from __future__ import annotations

import importlib
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from runtime.kernels.unavailable import Unavailable
from runtime.layouts import guided
from runtime.parity.dump import write_frames
from runtime.parity.golden import Golden
from runtime.parity.limits import Limit, limit_of
from runtime.parity.metrics import Comparison, Unsupported
from runtime.parity.places import place_of
from runtime.parity.replay import KINDS, NO_CHECKPOINTS
from runtime.parity.report import CaseResult, Detail, Document, number
from runtime.parity.settings import Setting, settings_of
from runtime.parity.setup import Setup

AS_CAPTURED = Setup()


def replay_case(
    path: Path,
    checkpoints: Path,
    cpu: str,
    setup: Setup = AS_CAPTURED,
    dump: Path | None = None,
) -> CaseResult:
    """Replay one file; an error is a FAIL of this case and of no other.

    cpu: what runtime.parity.cpu.pin() answered, for the report. dump: a folder of this case's own
    for its pictures.
    """
    started = time.perf_counter()
    golden: Golden | None = None
    comparisons: Sequence[Comparison] = ()
    settings: Sequence[Setting] = ()
    status, reason = "", ""
    frames: list[Document] = []
    if dump is not None:
        folder = dump
        setup = replace(setup, on_frames=lambda *sides: frames.append(write_frames(folder, *sides)))
    try:
        golden = Golden(path)
        _check(golden, checkpoints, setup)
        settings = settings_of(golden, checkpoints, setup)
        comparisons = _replay(golden, checkpoints, setup)
        unread = _unread(golden, comparisons) if setup.staged else []
        if unread:
            status, reason = "unsupported", f"stored but not compared: {_some(unread)}"
    except (Unsupported, Unavailable) as error:
        status, reason = "unsupported", str(error)
    except Exception as error:  # whatever a replay raises is this case's failure
        status, reason = "FAIL", _described(error)
    judged = _judged(golden, comparisons) if golden else []
    found = _result(golden.case if golden else path.stem, path, judged, status, reason)
    return replace(
        found,
        seconds=time.perf_counter() - started,
        cpu=cpu,
        settings=settings,
        frames=frames[0] if frames else None,
    )


def _check(golden: Golden, checkpoints: Path, setup: Setup) -> None:
    if golden.kind not in KINDS:
        raise Unsupported(f"golden kind {golden.kind!r}; known: {', '.join(KINDS)}")
    if not setup.whole and golden.kind != "e2e":
        raise Unsupported(
            f"golden kind {golden.kind!r} has nothing that ranks share; replay it without a layout"
        )
    if setup.mesh.sides.size > 1 and not guided(float(golden.params.get("cfg", 1.0))):
        raise Unsupported("the golden has no negative side, which half of the ranks would compute")
    if golden.kind not in NO_CHECKPOINTS and not checkpoints.is_dir():
        raise ValueError(
            f"there is no folder {checkpoints}; name the folder of the tiny checkpoints with "
            "--checkpoints"
        )


def _replay(golden: Golden, checkpoints: Path, setup: Setup) -> Sequence[Comparison]:
    module = importlib.import_module(KINDS[golden.kind].module)
    with torch.inference_mode():
        found: Sequence[Comparison] = module.replay(golden, checkpoints, setup)
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
        details=[_detail(c, limit) for c, limit in judged],
        divergence={run: _divergence(run, judged) for run in ("free", "staged")},
    )


def _divergence(run: str, judged: list[tuple[Comparison, Limit | None]]) -> Detail | None:
    """The first tensor of a run beyond its limit, else the first that differs."""
    ours = [(c, limit) for c, limit in judged if c.run == run and not c.equal]
    beyond = [(c, limit) for c, limit in ours if not _passes(c, limit)]
    found = next(iter(beyond or ours), None)
    return None if found is None else _detail(*found)


def _passes(c: Comparison, limit: Limit | None) -> bool:
    if c.equal or c.problem:
        return c.equal
    return limit is None or (
        c.relative_l2 <= limit.relative_l2
        and c.max_abs <= limit.max_abs
        and c.relative_max <= limit.relative_max
    )


def _first(different: list[Comparison]) -> Comparison | None:
    """Staged before free: a staged difference names the stage that is wrong by itself."""
    staged = [c for c in different if c.run == "staged"]
    return next(iter(staged or different), None)


def _named(c: Comparison) -> str:
    problem = f" ({c.problem})" if c.problem else ""
    return f"{c.run} {c.stage}: {c.name}{problem}"


def _detail(c: Comparison, limit: Limit | None) -> Detail:
    place = place_of(c.name, c.stage)
    return {
        "name": c.name,
        "run": c.run,
        "stage": c.stage,
        "step": None if place.step < 0 else place.step,
        "part": place.part,
        "quantity": place.quantity,
        "equal": c.equal,
        "passed": _passes(c, limit),
        "max_abs": number(c.max_abs),
        "mean_abs": number(c.mean_abs),
        "relative_l2": number(c.relative_l2),
        "relative_max": number(c.relative_max),
        "cosine": number(c.cosine),
        "psnr": number(c.psnr),
        "limit": "" if limit is None else limit.name,
        "limit_relative_l2": None if limit is None else number(limit.relative_l2),
        "limit_max_abs": None if limit is None else number(limit.max_abs),
        "limit_relative_max": None if limit is None else number(limit.relative_max),
        "problem": c.problem,
    }
