"""Plan field transport = copy_engine: ranks write their messages into each other's memory.

A GPU's copy engines do it, which take no processor from what is computed meanwhile: NCCL's kernels
do, and hide two fifths of an exchange behind attention (docs/experiments.md). torch's symmetric
memory maps the windows and meets; one host, GPUs that reach each other's memory.

UNVALIDATED: never run on GPUs. The order of meeting, writing and reading is tested on CPU ranks
that share memory (tests/unit/test_parallel_copies.py).
"""

from __future__ import annotations

import functools
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.parallel.mesh import BACKSTOP, Group, Mesh

NAME = "transport copy_engine"
# Of one evaluation: there and back for three messages, and what is predicted. Two sides of a
# request have rows of their own.
MOST_WINDOWS = 16
# Nothing here writes to all at once, and a fault of NVLink multicast outlives the program.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Window(Protocol):
    """As many bytes in each member's memory, to which all members write."""

    def of(self, member: int, start: int, count: int) -> Tensor:
        """uint8 [count] of that member's."""

    def meet(self) -> None:
        """The current stream goes on once those of all members are here."""


class Route(NamedTuple):
    """Where a message goes, in bytes."""

    window: Window
    num_bytes: int  # of the window
    starts: tuple[int, ...]  # in each member's window: of what comes from this rank


@dataclass(frozen=True, slots=True)
class Ends:
    """What a member says of an exchange, in bytes."""

    to: tuple[int, ...]
    of: tuple[int, ...]


class CopyEngine:
    """Exchanges of one group. agree: every member's value, on every member; open: a window of so
    many bytes, of all members at once.

    What an exchange returns lies in its window, which the next one of the same sizes and place
    writes over: its readers must be in the current stream by then.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        agree: Callable[[Ends], list[Ends]],
        open: Callable[[int], Window],
        settled: Callable[[], None],
    ) -> None:
        self._rank, self._size = rank, size
        self._agree, self._open, self._settled = agree, open, settled
        self._routes: OrderedDict[tuple[Ends, int], Route] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Of this member's windows; symmetric memory is not of torch's allocator."""
        return sum(route.num_bytes for route in self._routes.values())

    def exchange(self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int) -> Tensor:
        """As mesh.Group.exchange, in the current stream."""
        item = sent_N.itemsize
        ends = Ends(tuple(n * item for n in to), tuple(n * item for n in of))
        window, _, starts = self._route(ends, place)
        pieces = sent_N.view(torch.uint8).split(ends.to)
        window.meet()  # whoever reads what the last exchange left has read it
        for distance in range(self._size):  # each member from another, itself last
            member = (self._rank + 1 + distance) % self._size
            window.of(member, starts[member], ends.to[member]).copy_(pieces[member])
        window.meet()  # everything is there
        return window.of(self._rank, 0, sum(ends.of)).view(sent_N.dtype)

    def _route(self, ends: Ends, place: int) -> Route:
        """That of these sizes; sizes tell of all members, so all meet new ones in the same call."""
        found = self._routes.get((ends, place))
        if found is None:
            every = self._agree(ends)
            assert all(one.to[self._rank] == n for one, n in zip(every, ends.of, strict=True))
            starts = [
                sum(one.to[member] for one in every[: self._rank]) for member in range(self._size)
            ]
            if len(self._routes) == MOST_WINDOWS:
                self._settled()
                self._routes.popitem(last=False)
            num_bytes = max(sum(one.of) for one in every)
            found = Route(self._open(num_bytes), num_bytes, tuple(starts))
            self._routes[ends, place] = found
        self._routes.move_to_end((ends, place))
        return found


class SymmetricWindow:
    """torch's symmetric memory."""

    def __init__(self, members: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        os.environ.setdefault(_NO_MULTICAST, "1")  # read when the first window is mapped
        self._own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self._own, members)

    def of(self, member: int, start: int, count: int) -> Tensor:
        """A view; another member's memory has this process's device too."""
        found: Tensor = self._handle.get_buffer(member, (count,), torch.uint8, start)
        return found

    def meet(self) -> None:
        """A kernel of one block waits; with CUDA's error after the time that NCCL has."""
        self._handle.barrier(0, round(1000 * BACKSTOP.total_seconds()))


def copies(plan: Plan, mesh: Mesh) -> bool:
    """Are there rows to exchange so?"""
    return plan.transport == "copy_engine" and mesh.rows.size > 1


def by_copy_engine(group: Group, device: torch.device) -> Group:
    """The same group, whose exchanges go by copy engines; every member calls it at the same time.

    Unavailable, on all members, where one cannot reach another's memory.
    """
    assert group.members is not None, "a rank alone exchanges nothing"
    gathered = functools.partial(_gathered, group.members, group.size)
    index = torch.cuda.current_device() if device.index is None else device.index
    places = gathered((socket.gethostname(), index))
    reasons = [reason for reason in gathered(_obstacle(places, group.rank)) if reason]
    if reasons:
        raise Unavailable(NAME, f"{reasons[0]}; choose transport collective")
    engine = CopyEngine(
        group.rank,
        group.size,
        agree=gathered,
        open=functools.partial(SymmetricWindow, group.members, torch.device("cuda", index)),
        settled=functools.partial(torch.cuda.synchronize, index),
    )
    return replace(group, copies=engine)


def _gathered(members: dist.ProcessGroup, size: int, value: Any) -> list[Any]:
    found = [None] * size
    dist.all_gather_object(found, value, group=members)
    return found


def _obstacle(places: Sequence[tuple[str, int]], rank: int) -> str:
    """Why this rank does not reach the others' memory; "" where it does. places: host and GPU."""
    host, own = places[rank]
    for other_host, other in places:
        if other_host != host:
            return f"ranks on hosts {host} and {other_host} share no memory"
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} does not reach the memory of GPU {other}"
    return ""
