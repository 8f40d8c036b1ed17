"""Ragged Ulysses: each rank holds some rows, and attends over all rows for some heads.

Q, K and V of a group of heads travel as one message, and arrive in the layout that one rank alone
has them in; attention runs on all packed rows; its output travels back. Nothing is padded: rows and
heads differ by one between ranks. S rows, R own rows, H heads, h heads here, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from runtime.kernels.attention.base import Attend
from runtime.kernels.elementwise.base import Copy
from runtime.parallel.carriers import carrier_of
from runtime.parallel.mesh import Exchange, Group, Wait
from runtime.parallel.shares import RowShares
from runtime.parallel.turns import HALVES, Turn, counts_of, turns


class Ulysses:
    """An Attend over one rank's rows, from one over all rows.

    wait: how the end of an exchange is waited for (Exchange.wait, measured or not). parts: which of
    each rank's heads travel while attention runs on others (turns). copy: what kernels copy with.
    """

    def __init__(
        self,
        attend: Attend,
        group: Group,
        rows: RowShares,
        wait: Wait,
        parts: Sequence[int] = HALVES,
        copy: Copy = Tensor.copy_,
    ) -> None:
        self._attend, self._group, self._wait, self._parts = attend, group, wait, parts
        self._carrier = carrier_of(group, rows, copy)

    def __call__(self, q_BHRd: Tensor, k_BHRd: Tensor, v_BHRd: Tensor) -> Tensor:
        """[1, H, R, d] views of one buffer -> [1, R, H*d]."""
        qkv_R3Hd = _joined(*(x[0].transpose(0, 1) for x in (q_BHRd, k_BHRd, v_BHRd)))
        order = enumerate(self.turns(q_BHRd.shape[1]))
        there = [self.send(qkv_R3Hd, turn, place) for place, turn in order]
        return self.attended(there, q_BHRd.shape)

    def turns(self, num_heads: int) -> list[Turn]:
        """What travels together, in the order in which `attended` wants it."""
        return turns(num_heads, self._group.size, self._parts)

    def send(self, qkv_R3Hd: Tensor, turn: Turn, place: int) -> Exchange:
        """To each rank its heads of these rows, [R, 3, h, d]: there they become [S, 3, h, d].

        place: of the turn in `turns`.
        """
        return self._carrier.there(qkv_R3Hd, turn, place)

    def attended(self, there: Sequence[Exchange], shape: Sequence[int]) -> Tensor:
        """Attention over what was sent in `turns`; shape: of q, [1, H, R, d] -> [1, R, H*d]."""
        _, num_heads, _, width = shape
        order = self.turns(num_heads)
        back = []
        for place, (exchange, turn) in enumerate(zip(there, order, strict=True)):
            own = counts_of(turn)[self._group.rank]
            qkv_S3hd = self._wait(exchange).view(-1, 3, own, width)
            q, k, v = (x[None].transpose(1, 2) for x in qkv_S3hd.unbind(1))
            back.append(self._carrier.back(self._attend(q, k, v)[0], turn, num_heads, place))
        return self._carrier.joined(back, order, num_heads, self._wait)


def _joined(q_RHd: Tensor, k_RHd: Tensor, v_RHd: Tensor) -> Tensor:
    """[R, 3, H, d]: the buffer of which the three are views, equally far from each other."""
    first, between = q_RHd.storage_offset(), k_RHd.storage_offset() - q_RHd.storage_offset()
    together = (
        q_RHd.data_ptr() + between * q_RHd.itemsize == k_RHd.data_ptr()
        and k_RHd.data_ptr() + between * q_RHd.itemsize == v_RHd.data_ptr()
        and q_RHd.stride() == k_RHd.stride() == v_RHd.stride()
        and q_RHd.untyped_storage().data_ptr() == v_RHd.untyped_storage().data_ptr()
    )
    assert together, "q, k and v are views of one projection"
    rows, heads, width = q_RHd.shape
    of_row, of_head, of_value = q_RHd.stride()
    return q_RHd.as_strided((rows, 3, heads, width), (of_row, between, of_head, of_value), first)
