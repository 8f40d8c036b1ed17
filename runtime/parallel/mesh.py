"""Groups of ranks from a layout, and how the members of a group talk about tensors.

Every member makes the same calls in the same order. On a GPU an exchange runs on NCCL's own stream
beside what is computed until its result is waited for; gloo does the same for CPU ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from runtime.layouts import Layout


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange under way: what was sent has to live until it is over."""

    received: Tensor
    sent: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """What arrived; on a GPU the stream waits, not the caller."""
        if self.work is not None:
            self.work.wait()
        return self.received


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that share something; `rank` is this one's number among them. Alone, nothing is sent.

    members: dist's handle, None for one rank alone.
    """

    rank: int = 0
    size: int = 1
    members: dist.ProcessGroup | None = None

    def exchange(self, sent_N: Tensor, to: Sequence[int], of: Sequence[int]) -> Exchange:
        """A contiguous vector cut into to[i] values for member i; of[i] values come from it.

        What is received lies in the order of the members.
        """
        if self.members is None:
            return Exchange(sent_N, sent_N)
        received_N = sent_N.new_empty(sum(of))
        work = dist.all_to_all_single(
            received_N, sent_N, list(of), list(to), group=self.members, async_op=True
        )
        return Exchange(received_N, sent_N, work)

    def gather(self, own_N: Tensor, of: Sequence[int]) -> Exchange:
        """Every member's vector, of[i] values of member i, on every member."""
        if self.members is None:
            return Exchange(own_N, own_N)
        return self.exchange(own_N.repeat(self.size), [own_N.numel()] * self.size, of)

    def maximum(self, x: Tensor) -> Tensor:
        """The largest of every member's value, element by element; x is written over."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the members, element by element; x is written over."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def _reduced(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.members is None:
            return x
        x = x.contiguous()
        dist.all_reduce(x, how, group=self.members)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """rows: the ranks among which rows and heads are shared (Ulysses). weights: those that share
    each weight (tensor parallel). everyone: all ranks of the layout.
    """

    rows: Group = Group()
    weights: Group = Group()
    everyone: Group = Group()

    @property
    def backend(self) -> str:
        """What carries the tensors, "" for a rank alone; for the record of a run."""
        members = self.everyone.members
        return "" if members is None else dist.get_backend(members)


ALONE = Mesh()


def mesh_of(layout: Layout) -> Mesh:
    """The groups of this process in dist's default group, which must have the layout's ranks.

    Every rank calls it at the same time, as each takes part in the making of all groups.
    """
    if layout.ranks == 1:
        return ALONE
    assert dist.get_world_size() == layout.ranks, "the engine starts a layout's number of ranks"
    return Mesh(
        rows=_mine([range(first, layout.ranks, layout.tensor) for first in range(layout.tensor)]),
        weights=_mine(
            [range(first, first + layout.tensor) for first in range(0, layout.ranks, layout.tensor)]
        ),
        everyone=_mine([range(layout.ranks)]),
    )


def _mine(partition: Sequence[Sequence[int]]) -> Group:
    """The group of a partition that this rank is in."""
    mine, own = dist.get_rank(), Group()
    for ranks in partition:
        if len(ranks) == 1:
            continue
        whole = len(partition) == 1
        members = dist.group.WORLD if whole else dist.new_group(list(ranks))
        if mine in ranks:
            own = Group(rank=ranks.index(mine), size=len(ranks), members=members)
    return own
