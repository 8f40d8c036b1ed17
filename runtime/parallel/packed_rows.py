"""Packed NVFP4 rows of all ranks from each rank's own: the operand that one rank alone would have.

A row of K values is K/2 bytes of codes and K/16 of block scales. Both are made of the row and of
the scale of all rows alone, so with that scale shared the gathered integers are one rank's, bit for
bit. Only the block scales' tiles of 128 rows are not: a rank's own tiles end with its rows, so the
scales travel row by row and the tiles are laid anew, with zeros after the last row as there.
Columns of whole blocks are cut in the same way: what a rank packs of its heads for all rows is that
part of every row.

Of H3 (K = 5376, 56 heads of 128) with 20,511 rows a rank sends, each layer, in MB:

| ranks | Q, K, V in bf16 to their heads' ranks | packed rows to all | heads' output back | packed |
| --- | --- | --- | --- | --- |
| 2 | 220.5 | 31.0 | 73.5 | 20.7 |
| 4 | 165.4 | 46.5 | 55.1 | 15.5 |
| 8 | 96.5 | 54.3 | 32.2 | 9.0 |

S rows, R own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from comfy_kitchen.float_utils import from_blocked, to_blocked
from torch import Tensor

from runtime.kernels.linear.nvfp4_native import NVFP4Rows
from runtime.parallel.mesh import Exchange, Group, Wait
from runtime.parallel.shares import RowShares

BLOCK = 16  # values of a row that share a scale
_PADDED = 16  # codes lie in whole groups of that many rows


class PackedGather:
    """Own rows to all rows. wait: how the end of an exchange is waited for."""

    def __init__(self, group: Group, rows: RowShares, wait: Wait = Exchange.wait) -> None:
        self._group, self._rows, self._wait = group, rows, wait

    def __call__(self, own: NVFP4Rows) -> NVFP4Rows:
        """R rows -> S rows, in the order of the ranks."""
        message = _bytewise(own)
        per_row = message.shape[1]
        exchange = self._group.gather(
            message.flatten(), [count * per_row for count in self._rows.counts]
        )
        bytes_SB = self._wait(exchange).view(-1, per_row)
        return _laid([bytes_SB], own)


class PackedReturn:
    """All rows of own columns to own rows of all columns."""

    def __init__(self, group: Group, rows: RowShares, wait: Wait = Exchange.wait) -> None:
        self._group, self._rows, self._wait = group, rows, wait

    def __call__(self, own: NVFP4Rows, widths: Sequence[int]) -> NVFP4Rows:
        """S rows -> R rows; widths: columns of each rank, in whole blocks."""
        assert not any(width % BLOCK for width in widths), widths
        message = _bytewise(own)
        counts, per_row = self._rows.counts, [_bytes_of_a_row(width) for width in widths]
        mine = counts[self._group.rank]
        sizes = [mine * size for size in per_row]
        exchange = self._group.exchange(
            message.flatten(), [count * message.shape[1] for count in counts], sizes
        )
        parts = self._wait(exchange).split(sizes)
        return _laid([part.view(mine, -1) for part in parts], own)


def _bytes_of_a_row(width: int) -> int:
    """Codes and scales of so many values."""
    return width // 2 + width // BLOCK


def _bytewise(rows: NVFP4Rows) -> Tensor:
    """[rows, B]: of each its codes, then its scales."""
    width = rows.codes.shape[1]
    message = rows.codes.new_empty(rows.num_rows, _bytes_of_a_row(2 * width))
    message[:, :width] = rows.codes[: rows.num_rows]
    message[:, width:] = from_blocked(
        rows.blocks.view(torch.uint8), rows.num_rows, message.shape[1] - width
    )
    return message


def _laid(parts: Sequence[Tensor], like: NVFP4Rows) -> NVFP4Rows:
    """The rows of `_bytewise` as one process lays them, from the columns of each part."""
    codes, scales = [], []
    for part in parts:
        width = part.shape[1] * BLOCK // (BLOCK + 2)
        codes.append(part[:, :width])
        scales.append(part[:, width:])
    num_rows = len(parts[0])
    padded = F.pad(_beside(codes), (0, 0, 0, -num_rows % _PADDED)).contiguous()
    blocks = to_blocked(_beside(scales), flatten=False).view(like.blocks.dtype)
    return like._replace(codes=padded, blocks=blocks, num_rows=num_rows)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


Gather = Callable[[NVFP4Rows], NVFP4Rows]
Return = Callable[[NVFP4Rows, Sequence[int]], NVFP4Rows]


def not_gathered(own: NVFP4Rows) -> NVFP4Rows:
    """All the rows are here."""
    return own
