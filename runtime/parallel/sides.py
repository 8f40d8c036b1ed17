"""Guidance on two groups of ranks: each predicts one side of a step, then both have both.

What is exchanged is a side's prediction as it is combined, so that the sum is one process's, bit
for bit. Rank i of one group talks to rank i of the other: 4 bytes for each value of the latents,
7.3 MB a step at 960x544 and 124 frames. The sides may have texts of different lengths; the
shorter one waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from runtime.meter import COMMUNICATION, StepMeter
from runtime.parallel.mesh import Exchange, Group, Mesh


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides on one rank, or one on each of two.

    wait: how the end of an exchange is waited for (Exchange.wait, measured or not).
    """

    group: Group
    wait: Callable[[Exchange], Tensor] = Exchange.wait

    @classmethod
    def of(cls, mesh: Mesh, meter: StepMeter | None = None) -> Sides:
        """Those of a layout; `meter` measures how long they wait."""
        if meter is None:
            return cls(mesh.sides)
        group = replace(mesh.sides, timed=meter.transfer)
        return cls(group, meter.wrap(COMMUNICATION, Exchange.wait))

    @property
    def shared(self) -> bool:
        """Does another rank have the other side?"""
        return self.group.size > 1

    @property
    def own(self) -> int:
        """0: the positive one, 1: the negative one; only where they are shared."""
        return self.group.rank

    def both(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's prediction to those of the positive and the negative side, of its shape."""
        exchange = self.group.gather(own.reshape(-1), [own.numel()] * self.group.size)
        positive, negative = self.wait(exchange).chunk(2)
        return positive.view(own.shape), negative.view(own.shape)


IN_TURN = Sides(Group())
