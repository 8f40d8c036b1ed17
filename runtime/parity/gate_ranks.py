"""P's evaluations on the ranks of its layout, for a gate against a plan on one device.

Every rank makes both evaluations, as all take part in each; what rank 0 found is told.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from runtime.kernels.unavailable import Unavailable
from runtime.layouts import SINGLE, Layout
from runtime.messages import Plan
from runtime.parallel.mesh import mesh_of
from runtime.parity.gate_cases import Case
from runtime.parity.gate_runs import Run, Trajectory
from runtime.parity.ranks import Died, answers, killed
from runtime.team import Meeting, meet
from runtime.worker import sentence

_LOOPBACK = "lo"
_ALONE = {
    "layout": SINGLE,
    "overlap": "off",
    "gather": "heads",
    "transport": "collective",
    "row_split": "",
    "amax": "shared",
}


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
    if blocks:
        raise ValueError(
            f"--blocks compares whole blocks of one process, and layout {p.layout} shares an "
            f"evaluation among ranks; leave out one of them"
        )
    if p.device == "cuda":
        _check_gpus(p)


def check_sides(p: Plan, cases: Sequence[Case]) -> None:
    """ValueError where a layout has ranks for a negative side and no case has one."""
    if Layout.parse(p.layout).guidance > 1 and all(case.negative is None for case in cases):
        raise ValueError(
            f"layout {p.layout} gives half of its ranks the negative side, and no case has one; "
            f"choose a layout without CFG2, guided goldens, or a --request whose cfg is not 1"
        )


def _check_gpus(p: Plan) -> None:
    if (ranks := Layout.parse(p.layout).ranks) > (count := torch.cuda.device_count()):
        raise ValueError(f"layout {p.layout} needs {ranks} GPUs, this machine has {count}")


def evaluations(
    p: Plan, case: Case, reference: Trajectory, block_step: int
) -> tuple[Trajectory, Trajectory]:
    """P forced on the reference's run, and its own; on as many processes as its layout has ranks.

    Raises what all ranks raised (Unavailable for one), and RankFailed where one ended otherwise.
    """
    if p.layout == SINGLE:
        run = Run(p, case)
        return run.forced(reference, block_step), run.free()
    ranks = Layout.parse(p.layout).ranks
    with tempfile.TemporaryDirectory(prefix="h3-gate-ranks-") as folder:
        # plain pickles: multiprocessing's would share the tensors' memory with this process
        (Path(folder) / "task").write_bytes(pickle.dumps((p, case, reference)))
        said = answers(partial(_rank, folder), ranks, lambda failure: failure is not None)
        failures = {rank: failure for rank, failure in said.items() if failure is not None}
        if failures:
            raise _error(failures, killed(said, ranks))
        found: tuple[Trajectory, Trajectory]
        found = pickle.loads((Path(folder) / "found").read_bytes())
    return found


@dataclass(frozen=True, slots=True)
class _Failure:
    """Of a rank. name: of the backend that is Unavailable. refused: a ValueError."""

    reason: str
    name: str = ""
    refused: bool = False

    def __str__(self) -> str:
        return self.reason


def _error(failures: Mapping[int, _Failure | Died], killed: str) -> Exception:
    """failures: in the order in which they came; what is no refusal of all is told of the first."""
    refusals = {r: f for r, f in failures.items() if isinstance(f, _Failure) and f.refused}
    if len(refusals) == len(failures) and not killed:
        told = refusals[min(refusals)]
        return Unavailable(told.name, told.reason) if told.name else ValueError(told.reason)
    rank, first = next(iter(failures.items()))
    return RankFailed("; ".join(filter(None, (f"rank {rank} ended: {first}", killed))))


def _rank(folder: str, rank: int, store: str) -> _Failure | None:
    """Leaves what it found in the folder if it is rank 0; tells why it could not."""
    try:
        p, case, reference = pickle.loads((Path(folder) / "task").read_bytes())
        layout = Layout.parse(p.layout)
        meet(
            Meeting(rank=rank, ranks=layout.ranks, local=rank, store=store, interface=_LOOPBACK),
            p,
        )
        run = Run(p, case, mesh_of(layout))
        found = (run.forced(reference), run.free())
    except Unavailable as error:  # of the plan or its shapes: all ranks find it
        return _Failure(error.reason, error.name, refused=True)
    except ValueError as error:
        return _Failure(str(error), refused=True)
    except Exception as error:  # whatever it is, it is told with the rank
        return _Failure(sentence(error))
    if rank == 0:
        (Path(folder) / "found").write_bytes(pickle.dumps(found))
    return None
