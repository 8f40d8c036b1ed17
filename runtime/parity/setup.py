"""How a case is replayed: on which device, with whose backends, and who watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.messages import Plan
from runtime.parallel.mesh import ALONE, Mesh

CPU = torch.device("cpu")

OnStep = Callable[[str, int, int], None]  # run ("free", "staged"), steps done, steps in all
OnFrames = Callable[[str, Tensor, Tensor], None]  # source, golden [T,H,W,3] in [0,1], ours


def unwatched(run: str, done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Elsewhere than on the CPU only free runs are made: what is stored came from a CPU.

    plan: whose backends are used where the golden leaves them open; None: the golden's own.
    on_frames: wants the decoded pictures of both sides. mesh: the ranks that replay together; of
    several, each has parts of what is stored of the modules, which are then not compared.
    """

    device: torch.device = CPU
    plan: Plan | None = None
    on_step: OnStep = unwatched
    on_frames: OnFrames | None = None
    mesh: Mesh = ALONE

    @property
    def staged(self) -> bool:
        """Each stage is also run from its stored inputs."""
        return self.device.type == "cpu" and self.whole

    @property
    def whole(self) -> bool:
        """All rows, heads and weights are in this process."""
        return self.mesh.everyone.size == 1
