"""Ragged Ulysses: each rank holds some rows, and attends over all rows for some heads.

Q, K and V of a group of heads travel as one message, and arrive in the layout that one rank alone
has them in; attention runs on all packed rows; its output travels back. Nothing is padded: rows and
heads differ by one between ranks. S rows, R own rows, H heads, h heads here, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend
from runtime.parallel.mesh import Exchange, Group
from runtime.parallel.shares import head_shares, ranges, shares

CHUNKS = 2  # of each rank's heads: one is on its way while attention runs on the other

Wait = Callable[[Exchange], Tensor]


@dataclass(slots=True)
class RowShares:
    """How many rows each rank has in the running evaluation; set before its blocks run."""

    counts: tuple[int, ...] = ()


class Ulysses:
    """An Attend over one rank's rows, from one over all rows.

    wait: how the end of an exchange is waited for (Exchange.wait, measured or not).
    """

    def __init__(
        self, attend: Attend, group: Group, rows: RowShares, wait: Wait, chunks: int = CHUNKS
    ) -> None:
        self._attend, self._group, self._rows = attend, group, rows
        self._wait, self._chunks = wait, chunks

    def __call__(self, q_BHRd: Tensor, k_BHRd: Tensor, v_BHRd: Tensor) -> Tensor:
        """[1, H, R, d] views -> [1, R, H*d]."""
        _, num_heads, num_rows, width = q_BHRd.shape
        chunks = self.head_chunks(num_heads)
        qkv = [x[0].transpose(0, 1) for x in (q_BHRd, k_BHRd, v_BHRd)]
        there = [self._send(qkv, heads) for heads in chunks]
        back = [
            self._attended(exchange, heads, width)
            for exchange, heads in zip(there, chunks, strict=True)
        ]
        out_RHd = torch.empty(
            num_rows, num_heads, width, dtype=back[0].sent.dtype, device=q_BHRd.device
        )
        for exchange, heads in zip(back, chunks, strict=True):
            received = self._wait(exchange)
            sizes = [num_rows * _count(part) * width for part in heads]
            for part, piece in zip(heads, received.split(sizes), strict=True):
                out_RHd[:, part] = piece.view(num_rows, -1, width)
        return out_RHd.flatten(1)[None]

    def head_chunks(self, num_heads: int) -> list[list[slice]]:
        """By chunk and rank: the heads of that rank that travel in that chunk."""
        counts = head_shares(num_heads, self._group.size)
        chunks = min(self._chunks, *counts)
        found: list[list[slice]] = [[] for _ in range(chunks)]
        for whole in ranges(counts):
            for chunk, part in enumerate(ranges(shares(_count(whole), chunks))):
                found[chunk].append(slice(whole.start + part.start, whole.start + part.stop))
        return found

    def _send(self, qkv: list[Tensor], heads: list[slice]) -> Exchange:
        """To each rank its heads of these rows, [R, 3, h, d]: there they become [S, 3, h, d]."""
        num_rows, _, width = qkv[0].shape
        sizes = [num_rows * 3 * _count(part) * width for part in heads]
        buffer = qkv[0].new_empty(sum(sizes))
        for part, piece in zip(heads, buffer.split(sizes), strict=True):
            piece_R3hd = piece.view(num_rows, 3, -1, width)
            for index, x_RHd in enumerate(qkv):
                piece_R3hd[:, index] = x_RHd[:, part]
        own = 3 * _count(heads[self._group.rank]) * width
        return self._group.exchange(buffer, sizes, [rows * own for rows in self._rows.counts])

    def _attended(self, exchange: Exchange, heads: list[slice], width: int) -> Exchange:
        """Attention of this rank's heads; every rank's rows of the output are on their way."""
        own = _count(heads[self._group.rank])
        qkv_S3hd = self._wait(exchange).view(-1, 3, own, width)
        q, k, v = qkv_S3hd.unbind(1)
        out_BSD = self._attend(*(x[None].transpose(1, 2) for x in (q, k, v)))
        counts = self._rows.counts
        mine = counts[self._group.rank]
        return self._group.exchange(
            out_BSD.reshape(-1),
            [rows * own * width for rows in counts],
            [mine * _count(part) * width for part in heads],
        )


def _count(part: slice) -> int:
    return int(part.stop - part.start)
