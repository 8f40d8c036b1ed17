"""Work on several ranks: processes of this machine that meet as the engine's ranks do.

Like `command`, this imports no torch: each rank is pinned before it does.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TypeVar

from runtime.lifeline import die_with_parent
from runtime.parity.report import CaseResult

T = TypeVar("T")

# rank, store of the meeting -> its result
Replay = Callable[[int, str], CaseResult]
GRACE_SECONDS = 20.0  # of the others once a rank has failed: they may wait for it in an exchange
_DYING_SECONDS = 0.5  # a death is seen that much later than what it breaks in another rank
_BADNESS = ("bit-equal", "pass", "info", "unsupported", "FAIL")


@dataclass(frozen=True, slots=True)
class Died:
    """Of a rank that ended without a word."""

    exit_code: int | None

    def __str__(self) -> str:
        return f"its process died (exit code {self.exit_code}; out of memory?)"


def answers(
    work: Callable[[int, str], T], ranks: int, failed: Callable[[T], bool]
) -> dict[int, T | Died]:
    """By rank what work(rank, store) returned there, in the order in which they ended.

    Once one has failed or died the others have GRACE_SECONDS; who is not here then was killed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="h3-parity-ranks-") as folder:
        store = f"file://{folder}/store"
        pairs = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(work, rank, store, theirs, os.getpid()))
            process.start()
            theirs.close()
            pairs.append((process, ours))
        try:
            return _gathered(pairs, failed)
        finally:
            for process, ours in pairs:
                process.kill()
                process.join()
                ours.close()


def on_ranks(replay: Replay, ranks: int, case: str, path: Path) -> CaseResult:
    """The worst result of all ranks, with the rank in its reason where that is not 0."""

    def result(answer: CaseResult | Died) -> CaseResult:
        if isinstance(answer, CaseResult):
            return answer
        return CaseResult(case=case, path=str(path), status="FAIL", reason=str(answer))

    found = answers(replay, ranks, lambda answer: answer.status in ("FAIL", "unsupported"))
    told = _worst({rank: result(answer) for rank, answer in found.items()})
    reason = "; ".join(filter(None, (told.reason, killed(found, ranks))))
    return replace(told, reason=reason)


def killed(found: Mapping[int, object], ranks: int) -> str:
    """Which ranks have not answered; "" if all have."""
    silent = [f"rank {rank}" for rank in range(ranks) if rank not in found]
    return f"{', '.join(silent)} killed {GRACE_SECONDS:g} s later" if silent else ""


def _rank(
    work: Callable[[int, str], object], rank: int, store: str, told: Connection, parent: int
) -> None:
    die_with_parent(parent)
    told.send(work(rank, store))
    told.close()


def _gathered(
    pairs: list[tuple[SpawnProcess, Connection]], failed: Callable[[T], bool]
) -> dict[int, T | Died]:
    came: list[tuple[float, int, T | Died]] = []
    waiting = {rank: ours for rank, (_, ours) in enumerate(pairs)}
    until = float("inf")
    while waiting:
        left = None if until == float("inf") else max(0.0, until - time.monotonic())
        if not (ready := wait(list(waiting.values()), left)):
            break
        for rank in [rank for rank, ours in waiting.items() if ours in ready]:
            answer: T | Died = _received(pairs[rank][0], waiting.pop(rank))
            dead, now = isinstance(answer, Died), time.monotonic()
            came.append((now - _DYING_SECONDS * dead, rank, answer))
            if isinstance(answer, Died) or failed(answer):
                until = min(until, now + GRACE_SECONDS)
    return {rank: answer for _, rank, answer in sorted(came, key=lambda one: one[:2])}


def _received(process: SpawnProcess, ours: Connection) -> T | Died:
    try:
        answer: T = ours.recv()
    except EOFError:
        process.join(_DYING_SECONDS)
        return Died(process.exitcode)
    return answer


def _worst(found: Mapping[int, CaseResult]) -> CaseResult:
    """found: in the order in which they came; of errors the first, others may be its echo."""
    errors = [rank for rank, result in found.items() if result.status == "FAIL" and result.reason]
    if errors:
        rank = min(r for r in errors if found[r].reason == found[errors[0]].reason)
    else:
        rank = max(sorted(found), key=lambda r: (_BADNESS.index(found[r].status), -found[r].equal))
    if rank == 0:
        return found[0]
    return replace(
        found[rank], reason="; ".join(filter(None, (f"rank {rank}", found[rank].reason)))
    )
