"""How the heads of one turn travel: as one message of a collective, or by copies into windows.

A message is made and opened by kernels, which read and write all of it; copy engines take heads
from among others and lay them among others on their way, so that only a rank's own heads are laid
by a kernel. S rows, R own rows, H heads, h heads here, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from runtime.kernels.elementwise.base import Copy
from runtime.parallel.mesh import Exchange, Group, Landing, Wait
from runtime.parallel.shares import RowShares, ranges
from runtime.parallel.turns import Turn, counts_of, heads_of, pack, unpack


class Carrier(Protocol):
    """place: of the turn among those of a block, in the order in which they travel."""

    def there(self, qkv_R3Hd: Tensor, turn: Turn, place: int) -> Exchange:
        """To each rank its heads of these rows: received as [S, 3, h, d] in any shape."""

    def back(self, out_ShD: Tensor, turn: Turn, num_heads: int, place: int) -> Exchange:
        """[S, h*d] of a rank's heads in a turn, to each rank its rows."""

    def joined(
        self, back: Sequence[Exchange], order: Sequence[Turn], num_heads: int, wait: Wait
    ) -> Tensor:
        """[1, R, H*d] of what came back of all turns."""


class Messages:
    """By collectives."""

    def __init__(self, group: Group, rows: RowShares, copy: Copy) -> None:
        self._group, self._rows, self._copy = group, rows, copy

    def there(self, qkv_R3Hd: Tensor, turn: Turn, place: int) -> Exchange:
        """As Carrier."""
        num_rows, _, _, width = qkv_R3Hd.shape
        heads = counts_of(turn)
        own = 3 * heads[self._group.rank] * width
        return self._group.exchange(
            pack(qkv_R3Hd, turn, self._copy),
            [num_rows * 3 * count * width for count in heads],
            [rows * own for rows in self._rows.counts],
            place,
        )

    def back(self, out_ShD: Tensor, turn: Turn, num_heads: int, place: int) -> Exchange:
        """As Carrier."""
        counts, heads = self._rows.counts, counts_of(turn)
        own = out_ShD.shape[1]
        width = own // heads[self._group.rank]
        mine = counts[self._group.rank]
        return self._group.exchange(
            out_ShD.reshape(-1),
            [rows * own for rows in counts],
            [mine * count * width for count in heads],
            place,
        )

    def joined(
        self, back: Sequence[Exchange], order: Sequence[Turn], num_heads: int, wait: Wait
    ) -> Tensor:
        """As Carrier."""
        received, num_rows = back[0].received, self._rows.counts[self._group.rank]
        width = received.numel() // (num_rows * sum(counts_of(order[0])))
        out_RHd = received.new_empty(num_rows, num_heads, width)
        for exchange, turn in zip(back, order, strict=True):
            unpack(wait(exchange), turn, out_RHd, self._copy)
        return out_RHd.flatten(1)[None]


class Windows:
    """By copies of the group's."""

    def __init__(self, group: Group, rows: RowShares, copy: Copy) -> None:
        self._group, self._rows, self._copy = group, rows, copy

    def there(self, qkv_R3Hd: Tensor, turn: Turn, place: int) -> Exchange:
        """As Carrier."""
        num_rows, _, _, width = qkv_R3Hd.shape
        rows, counts = ranges(self._rows.counts), counts_of(turn)
        mine = (rows[self._group.rank],)
        # views: what is sent is held by its own piece, so a copy would go while it is read
        pieces = [
            qkv_R3Hd[:, :, heads].view(num_rows, 3, count * width)
            for heads, count in zip(heads_of(turn), counts, strict=True)
        ]
        landings = [Landing((rows[-1].stop, 3, count * width), mine) for count in counts]
        return self._group.put(pieces, landings, place, self._copy)

    def back(self, out_ShD: Tensor, turn: Turn, num_heads: int, place: int) -> Exchange:
        """As Carrier; all turns come back into one window."""
        heads = heads_of(turn)[self._group.rank]
        width = out_ShD.shape[1] // (heads.stop - heads.start)
        mine = (slice(None), slice(heads.start * width, heads.stop * width))
        pieces = out_ShD.split(list(self._rows.counts))
        landings = [Landing((count, num_heads * width), mine) for count in self._rows.counts]
        return self._group.put(pieces, landings, 0, self._copy)

    def joined(
        self, back: Sequence[Exchange], order: Sequence[Turn], num_heads: int, wait: Wait
    ) -> Tensor:
        """As Carrier: the window itself."""
        return [wait(exchange) for exchange in back][-1][None]


def carrier_of(group: Group, rows: RowShares, copy: Copy) -> Carrier:
    """That of the group's transport. copy: what kernels copy with."""
    return (Messages if group.copies is None else Windows)(group, rows, copy)
