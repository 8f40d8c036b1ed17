"""What several gates of one command share: the references' own runs and the yardsticks on them."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from runtime.messages import Plan
from runtime.parity.gate_cases import Case
from runtime.parity.gate_runs import Run, Trajectory


class References:
    """Trajectories of reference plans and what yardsticks say on them, each made once.

    With --all most backends share one reference; a plan's name plays no part.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Plan, str, int], Trajectory] = {}
        self._forced: dict[tuple[Plan, Plan, str], Trajectory] = {}

    def free(self, q: Plan, case: Case, block_step: int) -> Trajectory:
        """Q's own run; its denoiser is let go."""
        key = (_unnamed(q), case.name, block_step)
        if key not in self._free:
            self._free[key] = Run(q, case).free(block_step)
            let_go(q.device)
        return self._free[key]

    def yardstick(self, q: Plan, attention: str, case: Case, reference: Trajectory) -> Trajectory:
        """Q with another attention, forced on Q's own run. Unavailable where that cannot run."""
        other = replace(_unnamed(q), attention=attention)
        key = (_unnamed(q), other, case.name)
        if key not in self._forced:
            self._forced[key] = Run(other, case).forced(reference)
            let_go(q.device)
        return self._forced[key]


def _unnamed(plan: Plan) -> Plan:
    return replace(plan, name="")


def let_go(device: str) -> None:
    """Memory of a denoiser that nobody holds any more, before the next one is loaded."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
