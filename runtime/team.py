"""What the ranks of one plan tell each other beside the model: settings, conditions, tiles.

A rank alone is a team too: then nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.layouts import Layout
from runtime.messages import Plan
from runtime.parallel.mesh import BACKSTOP

T = TypeVar("T")

# Of the words between: rank 0 may read 33 GB of text encoder meanwhile. The engine watches.
PATIENCE = timedelta(hours=12)


class Team(Protocol):
    """All ranks call the methods that talk, in the same order."""

    rank: int
    ranks: int

    def share(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; what it raises there is PeerFailed on the others."""

    def collect(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""

    def send(self, x: Tensor) -> None:
        """A tensor to rank 0, which receives it."""

    def receive(self, rank: int, like: Tensor) -> Tensor:
        """On rank 0: the tensor that `rank` sends, of the shape, type and device of `like`."""

    def close(self) -> None:
        """The last call."""


class PeerFailed(Cancelled):
    """Rank 0 could not go on and tells why itself."""


class Alone:
    """The team of a plan on one device."""

    rank = 0
    ranks = 1

    def share(self, make: Callable[[], T]) -> T:
        """Its own."""
        return make()

    def collect(self, value: T) -> list[T]:
        """One."""
        return [value]

    def send(self, x: Tensor) -> None:
        """Nobody is there."""
        raise AssertionError("rank 0 sends nothing to itself")

    def receive(self, rank: int, like: Tensor) -> Tensor:
        """Nobody is there."""
        raise AssertionError(f"there is no rank {rank}")

    def close(self) -> None:
        """Nothing to close."""


ALONE = Alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks find each other. local: of the ranks on this host, whose GPU it takes.

    store: an URL of torch.distributed, new for every start: a dead team's store would mislead.
    """

    rank: int = 0
    ranks: int = 1
    local: int = 0
    store: str = ""
    interface: str = ""  # of the network; "": gloo and NCCL choose


class Ranks:
    """The team of a layout: words over gloo on the CPU, tensors where they lie."""

    def __init__(self, meeting: Meeting, device: str) -> None:
        self.rank, self.ranks = meeting.rank, meeting.ranks
        if meeting.interface:  # their only way to be told
            os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
            os.environ["NCCL_SOCKET_IFNAME"] = meeting.interface
        where = torch.device("cuda", meeting.local) if device == "cuda" else None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if where else "gloo",
            init_method=meeting.store,
            rank=meeting.rank,
            world_size=meeting.ranks,
            timeout=BACKSTOP,
            device_id=where,
        )
        self._words = dist.new_group(backend="gloo", timeout=PATIENCE)

    def share(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank."""
        box: list[tuple[bool, T | None]] = [(False, None)]
        if self.rank:
            dist.broadcast_object_list(box, src=0, group=self._words)
            made, value = box[0]
            if not made:
                raise PeerFailed
            return value  # type: ignore[return-value]
        try:
            own = make()
            box = [(True, own)]
        finally:
            dist.broadcast_object_list(box, src=0, group=self._words)
        return own

    def collect(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        found: list[T] = [value] * self.ranks
        dist.all_gather_object(found, value, group=self._words)
        return found

    def send(self, x: Tensor) -> None:
        """A tensor to rank 0."""
        dist.send(x.contiguous(), dst=0)

    def receive(self, rank: int, like: Tensor) -> Tensor:
        """The tensor that `rank` sends."""
        there = torch.empty_like(like)
        dist.recv(there, src=rank)
        return there

    def close(self) -> None:
        """Once all are done; a member that is missing has ended the others before."""
        with suppress(RuntimeError):
            dist.destroy_process_group()


def meet(meeting: Meeting, plan: Plan) -> Team:
    """The team of a plan, once all its ranks are there; ValueError where a GPU is missing."""
    layout = Layout.parse(plan.layout)
    if plan.device == "cuda" and meeting.local:
        _take_gpu(meeting.local, plan.layout)
    if layout.ranks == 1 and meeting.ranks == 1:
        return ALONE
    if layout.ranks != meeting.ranks:
        raise ValueError(
            f"layout {plan.layout} needs {layout.ranks} ranks, but {meeting.ranks} were started"
        )
    return Ranks(meeting, plan.device)


def _take_gpu(local: int, layout: str) -> None:
    count = torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"layout {layout} needs a GPU for each rank; rank {local} of this machine finds {count}"
        )
    torch.cuda.set_device(local)
