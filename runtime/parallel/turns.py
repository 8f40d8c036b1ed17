"""In which messages heads travel between ranks, and the copies that make and open a message.

Ranks differ by one head at most, the ones with more come first: so a message is made by one copy
where all ranks have as many heads in it, else by two. R own rows, H heads, h heads of one rank in
one message, P ranks, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from runtime.kernels.elementwise.base import Copy
from runtime.parallel.shares import head_shares, ranges

# Of a rank's heads. Nothing hides the way there of the first turn and the way back of the last, so
# EDGES has these two small; of 28 heads it is 5, 18 and 5. Each collective that NCCL hides behind
# attention slows that down, more than the two then save (docs/experiments.md); and where a turn is
# projected while the one before it travels (overlap = qkv), fewer products are larger ones.
EDGES, HALVES = (5, 18, 5), (1, 1)


class Run(NamedTuple):
    """Neighbouring ranks with `whole` heads each; heads [start, stop) of each travel together."""

    first: int  # head of the first of these ranks
    ranks: int
    whole: int
    start: int
    stop: int

    @property
    def each(self) -> int:
        """h: heads of one rank that travel."""
        return self.stop - self.start

    def of(self, x: Tensor) -> Tensor:
        """[..., H, d] -> [..., P, h, d], a view."""
        heads = x[..., self.first : self.first + self.ranks * self.whole, :]
        return heads.unflatten(-2, (self.ranks, self.whole))[..., self.start : self.stop, :]


Turn = tuple[Run, ...]  # one message of every rank: the runs in the order of the ranks


def turns(num_heads: int, ranks: int, parts: Sequence[int]) -> list[Turn]:
    """The heads in as many turns as there are parts, each rank's heads in proportion to them.

    In halves where a part would be less than two heads: attention over one or two fills no GPU.
    """
    counts = head_shares(num_heads, ranks)
    if min(counts) * min(parts) < 2 * sum(parts):
        parts = HALVES[: min(counts)]
    found: list[list[Run]] = [[] for _ in parts]
    first = 0
    for whole in dict.fromkeys(counts):
        alike = counts.count(whole)
        for turn, part in enumerate(ranges(_in_proportion(whole, parts))):
            found[turn].append(Run(first, alike, whole, part.start, part.stop))
        first += alike * whole
    return [tuple(turn) for turn in found]


def _in_proportion(heads: int, parts: Sequence[int]) -> list[int]:
    """Whole heads for each part, halves rounded up from the first on."""
    whole, found, given, reached = sum(parts), [], 0, 0
    for part in parts:
        reached += part
        stop = (2 * heads * reached + whole) // (2 * whole)
        found.append(stop - given)
        given = stop
    return found


def alone(turn: Turn) -> Turn:
    """The runs of a buffer that has the heads of this turn and no others, in the same order."""
    found: list[Run] = []
    first = 0
    for run in turn:
        if found and found[-1].each == run.each:  # they no longer differ
            found[-1] = found[-1]._replace(ranks=found[-1].ranks + run.ranks)
        else:
            found.append(Run(first, run.ranks, run.each, 0, run.each))
        first += run.ranks * run.each
    return tuple(found)


def heads_of(turn: Turn) -> list[slice]:
    """Of each rank."""
    firsts = [(run, run.first + i * run.whole) for run in turn for i in range(run.ranks)]
    return [slice(first + run.start, first + run.stop) for run, first in firsts]


def counts_of(turn: Turn) -> list[int]:
    """h of each rank."""
    return [run.each for run in turn for _ in range(run.ranks)]


def pack(x_RAHd: Tensor, turn: Turn, copy: Copy = Tensor.copy_) -> Tensor:
    """[R, A, H, d] of any strides -> one vector: for each rank its [R, A, h, d]."""
    rows, parts, _, width = x_RAHd.shape
    packed = x_RAHd.new_empty(rows * parts * sum(counts_of(turn)) * width)
    for run, piece in _pieces(packed, turn, rows * parts * width):
        into = piece.view(run.ranks, rows, parts, run.each, width)
        copy(into, run.of(x_RAHd).permute(2, 0, 1, 3, 4))
    return packed


def unpack(packed: Tensor, turn: Turn, into_RHd: Tensor, copy: Copy = Tensor.copy_) -> None:
    """One vector with each rank's [R, h, d] -> these heads of [R, H, d]."""
    rows, _, width = into_RHd.shape
    for run, piece in _pieces(packed, turn, rows * width):
        piece_RPhd = piece.view(run.ranks, rows, run.each, width).transpose(0, 1)
        copy(run.of(into_RHd), piece_RPhd)


def _pieces(packed: Tensor, turn: Sequence[Run], of_a_head: int) -> Iterator[tuple[Run, Tensor]]:
    sizes = [of_a_head * run.ranks * run.each for run in turn]
    return zip(turn, packed.split(sizes), strict=True)
