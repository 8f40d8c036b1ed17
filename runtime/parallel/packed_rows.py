"""Packed NVFP4 rows of all ranks from each rank's own: the operand that one rank alone would have.

A row of K values is K/2 bytes of codes and K/16 of block scales. Both are made of the row and of
the scale of all rows alone, so with that scale shared the gathered integers are one rank's, bit for
bit. Only the block scales' tiles of 128 rows are not: a rank's own tiles end with its rows, so the
scales travel row by row and the tiles are laid anew, with zeros after the last row as there.

Of H3 (K = 5376, 56 heads of 128) with 20,511 rows a rank sends, each layer, in MB:

| ranks | Q, K, V in bf16 to their heads' ranks | packed rows to all |
| --- | --- | --- |
| 2 | 220.5 | 31.0 |
| 4 | 165.4 | 46.5 |
| 8 | 96.5 | 54.3 |

S rows, R own rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from comfy_kitchen.float_utils import from_blocked, to_blocked

from runtime.kernels.linear.nvfp4_native import NVFP4Rows
from runtime.parallel.mesh import Exchange, Group
from runtime.parallel.ulysses import RowShares, Wait

BLOCK = 16  # values of a row that share a scale
_PADDED = 16  # codes lie in whole groups of that many rows


class PackedGather:
    """Own rows to all rows. wait: how the end of an exchange is waited for."""

    def __init__(self, group: Group, rows: RowShares, wait: Wait = Exchange.wait) -> None:
        self._group, self._rows, self._wait = group, rows, wait

    def __call__(self, own: NVFP4Rows) -> NVFP4Rows:
        """R rows -> S rows, in the order of the ranks."""
        width = own.codes.shape[1]
        per_row = width + 2 * width // BLOCK
        message = own.codes.new_empty(own.num_rows, per_row)
        message[:, :width] = own.codes[: own.num_rows]
        message[:, width:] = from_blocked(
            own.blocks.view(torch.uint8), own.num_rows, per_row - width
        )
        exchange = self._group.gather(
            message.flatten(), [count * per_row for count in self._rows.counts]
        )
        bytes_SB = self._wait(exchange).view(-1, per_row)
        num_rows = len(bytes_SB)
        codes = F.pad(bytes_SB[:, :width], (0, 0, 0, -num_rows % _PADDED)).contiguous()
        blocks = to_blocked(bytes_SB[:, width:], flatten=False).view(own.blocks.dtype)
        return own._replace(codes=codes, blocks=blocks, num_rows=num_rows)


Gather = Callable[[NVFP4Rows], NVFP4Rows]


def not_gathered(own: NVFP4Rows) -> NVFP4Rows:
    """All the rows are here."""
    return own
