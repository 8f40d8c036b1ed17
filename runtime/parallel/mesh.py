"""Groups of ranks from a layout, and how the members of a group talk about tensors.

Every member makes the same calls in the same order. On a GPU whatever goes between ranks runs on
one stream, one after another whichever the group, so that two groups never wait for each other; it
runs beside what is computed until its result is waited for. gloo's threads do the same for CPU
ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.kernels.elementwise.base import Copy
from runtime.layouts import Layout

BACKSTOP = timedelta(minutes=10)  # of an exchange of tensors; the engine finds a hang before it
# Marks the beginning of a transfer in the current stream; what it returns marks the end, once.
Timed = Callable[[], Callable[[], None]]


def _unmarked() -> None:
    """Nobody measures."""


def untimed() -> Callable[[], None]:
    """Nobody measures."""
    return _unmarked


@functools.cache
def line(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU on which it talks to the others; others wait for what it does."""
    return torch.cuda.Stream(device, priority=-1)


class Landing(NamedTuple):
    """Where a rank's piece comes to lie in what a member receives."""

    shape: tuple[int, ...]  # of all that the member receives
    part: tuple[slice, ...]


class Copies(Protocol):
    """Another way than the backend's collectives; runtime/parallel/copy_engine.py."""

    @property
    def num_bytes(self) -> int:
        """Of this rank's memory, held between exchanges; not of torch's allocator."""

    def exchange(self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int) -> Tensor:
        """As Group.exchange, in the current stream."""

    def put(self, pieces: Sequence[Tensor], landings: Sequence[Landing], place: int) -> Tensor:
        """As Group.put but for its own piece, in the current stream."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange under way. It has to be waited for: until then it holds what is read or written.

    work: of CPU ranks, done: of GPUs; neither where nothing was sent.
    """

    received: Tensor
    sent: Tensor
    work: dist.Work | None = None
    done: torch.cuda.Event | None = None
    ended: Callable[[], None] = _unmarked

    def wait(self) -> Tensor:
        """What arrived; on a GPU the stream waits, not the caller."""
        if self.done is not None:
            torch.cuda.current_stream(self.sent.device).wait_event(self.done)
        if self.work is not None:
            self.work.wait()
            self.ended()
        return self.received


Wait = Callable[[Exchange], Tensor]  # Exchange.wait, measured or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that share something; `rank` is this one's number among them. Alone, nothing is sent.

    members: dist's handle, None for one rank alone. timed: told of each transfer. copies: what its
    exchanges go by, None for dist's collectives.
    """

    rank: int = 0
    size: int = 1
    members: dist.ProcessGroup | None = None
    timed: Timed = untimed
    copies: Copies | None = None

    def exchange(
        self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int = 0
    ) -> Exchange:
        """A contiguous vector cut into to[i] values for member i; of[i] values come from it.

        What is received lies in the order of the members. place: exchanges of the same sizes and
        place may not be under way, or read, at the same time.
        """
        if self.members is None:
            return Exchange(sent_N, sent_N)
        if self.copies is not None:
            send = functools.partial(self.copies.exchange, sent_N, to, of, place)
            return self._copied(send, sent_N)
        received_N = sent_N.new_empty(sum(of))
        start = functools.partial(
            dist.all_to_all_single,
            received_N,
            sent_N,
            list(of),
            list(to),
            group=self.members,
            async_op=True,
        )
        return self._begun(start, received_N, sent_N)

    def put(
        self,
        pieces: Sequence[Tensor],
        landings: Sequence[Landing],
        place: int,
        copy: Copy,
    ) -> Exchange:
        """By `copies`: pieces[i] is written to where it lies in what member i receives.

        What is received has the shape of this member's landing, and lies in memory that the next
        one of the same shapes and place writes over. place: as for `exchange`, but that pieces of
        several may lie side by side in one. copy: makes its own piece, in the current stream, in
        which what is received is read.
        """
        assert self.copies is not None
        own = pieces[self.rank]
        exchange = self._copied(functools.partial(self.copies.put, pieces, landings, place), own)
        copy(exchange.received[landings[self.rank].part], own)  # what is sent does not wait for it
        return exchange

    def _copied(self, send: Callable[[], Tensor], sent: Tensor) -> Exchange:
        if sent.device.type != "cuda":  # of tests
            return Exchange(send(), sent)
        return self._on_line(send, sent)

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
        start = functools.partial(dist.all_reduce, x, how, group=self.members, async_op=True)
        return self._begun(start, x, x).wait()

    def _begun(self, start: Callable[[], dist.Work], received: Tensor, sent: Tensor) -> Exchange:
        if sent.device.type != "cuda":
            ended = self.timed()
            work = start()
            work.get_future().add_done_callback(lambda _: ended())
            return Exchange(received, sent, work=work, ended=ended)

        def send() -> Tensor:
            start().wait()  # it runs on a stream of NCCL's, which the line waits for
            return received

        return self._on_line(send, sent)

    def _on_line(self, send: Callable[[], Tensor], sent: Tensor) -> Exchange:
        """What `send` returns, sent once the current stream of a GPU is here and the line free."""
        stream = line(sent.device)
        stream.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.cuda.stream(stream):
            ended = self.timed()
            received = send()
            ended()
            done = stream.record_event()
        return Exchange(received, sent, done=done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """rows: the ranks among which rows and heads are shared (Ulysses). weights: those that share
    each weight (tensor parallel). evaluation: all that compute one side of a request together.
    sides: this rank and its like on the other side, the positive one first. everyone: all ranks of
    the layout.
    """

    rows: Group = Group()
    weights: Group = Group()
    evaluation: Group = Group()
    sides: Group = Group()
    everyone: Group = Group()

    def timed_by(self, timed: Timed) -> Mesh:
        """The same groups, which tell of their transfers."""
        groups = {f.name: replace(getattr(self, f.name), timed=timed) for f in fields(self)}
        return replace(self, **groups)

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
    ranks, tensor, side = layout.ranks, layout.tensor, layout.of_a_side
    sides = range(0, ranks, side)  # the first rank of each
    made: dict[tuple[range, ...], Group] = {}

    def group(*partition: range) -> Group:
        """That of this rank; one set of groups for parts that are the same."""
        if partition not in made:
            made[partition] = _mine(partition)
        return made[partition]

    return Mesh(
        rows=group(*(range(a + b, a + side, tensor) for a in sides for b in range(tensor))),
        weights=group(*(range(first, first + tensor) for first in range(0, ranks, tensor))),
        evaluation=group(*(range(first, first + side) for first in sides)),
        sides=group(*(range(first, ranks, side) for first in range(side))),
        everyone=group(range(ranks)),
    )


def _mine(partition: Sequence[range]) -> Group:
    """The group of a partition that this rank is in."""
    mine, own = dist.get_rank(), Group()
    for ranks in partition:
        if len(ranks) == 1:
            continue
        whole = len(partition) == 1
        members = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout=BACKSTOP)
        if mine in ranks:
            own = Group(rank=ranks.index(mine), size=len(ranks), members=members)
    return own
