"""How many bytes a step moves between ranks, from shapes alone: what the links' counters are read
against.

Counted is what goes to another rank and comes from one: a rank's message to itself is a copy. Sums
of tensor parallel ranks are counted as a ring makes them, which adds and then spreads them in n-1
parts of n each. Left out are the largest activations, one value for each linear that scales by it.

S rows, R rows of a rank, H heads, h heads of a rank, n ranks, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.layouts import Layout
from runtime.parallel.shares import head_shares, ranges, row_shares

_FP32 = 4
_PACKED = (9, 16)  # bytes of so many values as packed NVFP4: codes and a scale for 16


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one rank."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One evaluation. rows: S; targets: spans of S and values per row of what is predicted.

    value_bytes: of the compute dtype. gathered: packed rows of all take Q, K and V's place, and the
    heads' output travels packed.
    """

    rows: int
    targets: tuple[tuple[int, int, int], ...]  # start, stop, values
    heads: int
    head_dim: int
    hidden: int
    blocks: int
    value_bytes: int
    gathered: bool = False
    split: tuple[float, ...] = ()  # of the rows among ranks; row_shares'


def of_a_step(layout: Layout, sides: Sequence[Shape], latent_values: int) -> tuple[Moved, ...]:
    """Of each rank. sides: the evaluations of a step, the positive one first.

    latent_values: of video and sound, which ranks of two sides exchange in fp32.
    """
    if layout.guidance == 1:
        each = [evaluation(layout, side) for side in sides]
        return tuple(sum(of_rank, Moved()) for of_rank in zip(*each, strict=True))
    assert len(sides) == layout.guidance, "check_guidance comes first"
    latents = Moved(latent_values * _FP32, latent_values * _FP32)
    return tuple(moved + latents for side in sides for moved in evaluation(layout, side))


def evaluation(layout: Layout, shape: Shape) -> tuple[Moved, ...]:
    """Of each rank of a side: the sum over the blocks, and what is predicted."""
    weights, rows = layout.tensor, layout.ulysses
    counts = row_shares(shape.rows, rows, shape.split)
    found = []
    for rank in range(layout.of_a_side):
        heads = head_shares(shape.heads, weights)[rank % weights]
        place = rank // weights
        block = _sums(counts[place], weights, shape)
        if rows > 1:
            block += _heads(place, counts, heads, shape)
        predicted = _predicted(place, counts, shape) if rows > 1 else Moved()
        found.append(sum([block] * shape.blocks, predicted))
    return tuple(found)


def _heads(place: int, counts: Sequence[int], num_heads: int, shape: Shape) -> Moved:
    """Q, K and V to their heads' ranks, and the output of the heads to its rows' ranks."""
    mine, heads = counts[place], head_shares(num_heads, len(counts))
    value = shape.head_dim * shape.value_bytes
    away = (shape.rows - mine) * heads[place] * value  # of my heads, other ranks' rows
    kept = mine * (num_heads - heads[place]) * value  # of my rows, other ranks' heads
    if not shape.gathered:
        return Moved(3 * kept + away, 3 * away + kept)
    away, kept = (_packed(part // shape.value_bytes) for part in (away, kept))
    row = _packed(shape.hidden)
    there = mine * row * (len(counts) - 1)
    return Moved(there + away, (shape.rows - mine) * row + kept)


def _packed(values: int) -> int:
    return values * _PACKED[0] // _PACKED[1]


def _sums(rows: int, ranks: int, shape: Shape) -> Moved:
    """Of out and fc2, over the ranks that share each weight."""
    of_ring = 2 * (ranks - 1) * rows * shape.hidden * shape.value_bytes // ranks
    return Moved(2 * of_ring, 2 * of_ring)


def _predicted(place: int, counts: Sequence[int], shape: Shape) -> Moved:
    """Everyone's target rows to everyone, fp32."""
    own = [
        sum(_common(each, start, stop) * values for start, stop, values in shape.targets) * _FP32
        for each in ranges(counts)
    ]
    return Moved(own[place] * (len(counts) - 1), sum(own) - own[place])


def _common(rows: slice, start: int, stop: int) -> int:
    return max(0, min(rows.stop, stop) - max(rows.start, start))
