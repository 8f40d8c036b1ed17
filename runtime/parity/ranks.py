"""One case on several ranks: processes of this machine that meet as the engine's ranks do.

Like `command`, this imports no torch: each rank is pinned before it does.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from runtime.lifeline import die_with_parent
from runtime.parity.report import CaseResult

# rank, store of the meeting -> its result
Replay = Callable[[int, str], CaseResult]
GRACE_SECONDS = 20.0  # of the others once a rank has failed: they may wait for it in an exchange
_BADNESS = ("bit-equal", "pass", "info", "unsupported", "FAIL")


def on_ranks(replay: Replay, ranks: int, case: str, path: Path) -> CaseResult:
    """The worst result of all ranks, with the rank in its reason where that is not 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="h3-parity-ranks-") as folder:
        store = f"file://{folder}/store"
        pairs = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(replay, rank, store, theirs, os.getpid()))
            process.start()
            theirs.close()
            pairs.append((process, ours))
        try:
            found = _gathered(pairs, case, path)
        finally:
            for process, ours in pairs:
                process.kill()
                process.join()
                ours.close()
    return _worst(found)


def _rank(replay: Replay, rank: int, store: str, told: Connection, parent: int) -> None:
    die_with_parent(parent)
    told.send(replay(rank, store))
    told.close()


def _gathered(
    pairs: list[tuple[SpawnProcess, Connection]], case: str, path: Path
) -> dict[int, CaseResult]:
    """By rank; after a failure those that do not follow in time are left out."""
    found: dict[int, CaseResult] = {}
    waiting = {rank: ours for rank, (_, ours) in enumerate(pairs)}
    failed = False
    while waiting:
        ready = wait(list(waiting.values()), GRACE_SECONDS if failed else None)
        if not ready:
            break
        for rank in [rank for rank, ours in waiting.items() if ours in ready]:
            found[rank] = _received(waiting.pop(rank), case, path)
            failed = failed or found[rank].status == "FAIL"
    return found


def _received(ours: Connection, case: str, path: Path) -> CaseResult:
    try:
        result: CaseResult = ours.recv()
    except EOFError:
        reason = "its process died (out of memory?)"
        return CaseResult(case=case, path=str(path), status="FAIL", reason=reason)
    return result


def _worst(found: dict[int, CaseResult]) -> CaseResult:
    rank = max(sorted(found), key=lambda r: (_BADNESS.index(found[r].status), -found[r].equal))
    if rank == 0:
        return found[0]
    return replace(
        found[rank], reason="; ".join(filter(None, (f"rank {rank}", found[rank].reason)))
    )
