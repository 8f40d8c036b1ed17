"""P's evaluations on the ranks of its layout, for a gate against a plan on one device.

Every rank makes both evaluations, as all take part in each; what rank 0 found is told.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from runtime.kernels.unavailable import Unavailable
from runtime.layouts import SINGLE, Layout
from runtime.lifeline import die_with_parent
from runtime.messages import Plan
from runtime.parallel.mesh import mesh_of
from runtime.parity.gate_cases import Case
from runtime.parity.gate_runs import Run, Trajectory
from runtime.team import Meeting, meet

_LOOPBACK = "lo"
_ALONE = {"layout": SINGLE, "overlap": "off", "gather": "heads", "amax": "shared"}


class RankFailed(RuntimeError):
    """A rank could not go on; one sentence."""


def on_one_device(plan: Plan) -> Plan:
    """The plan without what it shares among ranks."""
    return replace(plan, **_ALONE)  # type: ignore[arg-type]


def check(p: Plan, q: Plan, blocks: bool) -> None:
    """ValueError for layouts that a gate does not evaluate, before anything is loaded."""
    if q.layout != SINGLE:
        raise ValueError(
            f"plan {q.name} has layout {q.layout}; the reference of a gate runs on one device, "
            f"so set its layout to single"
        )
    if p.layout == SINGLE:
        return
    if Layout.parse(p.layout).guidance > 1:
        raise ValueError(
            f"layout {p.layout} gives each side ranks of its own, and a gate evaluates both on all;"
            f" choose a layout without CFG2 (launch.py parity --layout replays guided goldens)"
        )
    if blocks:
        raise ValueError(
            f"--blocks compares whole blocks, and a rank of layout {p.layout} has part of each; "
            f"leave out one of them"
        )
    if p.device == "cuda":
        _check_gpus(p)


def _check_gpus(p: Plan) -> None:
    if (ranks := Layout.parse(p.layout).ranks) > (count := torch.cuda.device_count()):
        raise ValueError(f"layout {p.layout} needs {ranks} GPUs, this machine has {count}")


def evaluations(
    p: Plan, case: Case, reference: Trajectory, block_step: int
) -> tuple[Trajectory, Trajectory]:
    """P forced on the reference's run, and its own; on as many processes as its layout has ranks.

    Raises what rank 0 raised (Unavailable for one), and RankFailed where another ended.
    """
    if p.layout == SINGLE:
        run = Run(p, case)
        return run.forced(reference, block_step), run.free()
    with tempfile.TemporaryDirectory(prefix="h3-gate-ranks-") as folder:
        (Path(folder) / "task").write_bytes(pickle.dumps((p, case, reference)))
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(rank, folder, os.getpid()))
            for rank in range(Layout.parse(p.layout).ranks)
        ]
        for process in processes:
            process.start()
        try:
            _joined(processes, Path(folder))
            told: Any = pickle.loads((Path(folder) / "found").read_bytes())
        finally:
            for process in processes:
                process.kill()
                process.join()
    if isinstance(told, _Refused):
        raise Unavailable(told.name, told.reason) if told.name else ValueError(told.reason)
    found: tuple[Trajectory, Trajectory] = told
    return found


@dataclass(frozen=True, slots=True)
class _Refused:
    """A ValueError of a rank; name: of the backend that is Unavailable."""

    name: str
    reason: str


def _joined(processes: list[SpawnProcess], folder: Path) -> None:
    """Until rank 0 has told; RankFailed once a rank has ended otherwise."""
    running = dict(enumerate(processes))
    while not (folder / "found").exists():
        ended = wait([process.sentinel for process in running.values()])
        for rank in [r for r, process in running.items() if process.sentinel in ended]:
            process = running.pop(rank)
            process.join()
            if process.exitcode and not (folder / "found").exists():
                raise RankFailed(f"rank {rank} ended: {_last_words(folder, rank, process)}")


def _last_words(folder: Path, rank: int, process: SpawnProcess) -> str:
    said = folder / f"{rank}.error"
    lines = said.read_text(encoding="utf-8").strip().splitlines() if said.exists() else []
    return lines[-1] if lines else f"exit code {process.exitcode}"


def _rank(rank: int, folder: str, parent: int) -> None:
    die_with_parent(parent)
    p, case, reference = pickle.loads((Path(folder) / "task").read_bytes())
    layout = Layout.parse(p.layout)
    store = f"file://{folder}/store"
    found: object
    try:
        meet(
            Meeting(rank=rank, ranks=layout.ranks, local=rank, store=store, interface=_LOOPBACK),
            p,
        )
        run = Run(p, case, mesh_of(layout))
        found = (run.forced(reference), run.free())
    except Unavailable as error:  # of the plan or its shapes: all ranks find it
        found = _Refused(error.name, error.reason)
    except ValueError as error:
        found = _Refused("", str(error))
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    if rank == 0:
        part = Path(folder) / "part"
        part.write_bytes(pickle.dumps(found))
        part.rename(Path(folder) / "found")
