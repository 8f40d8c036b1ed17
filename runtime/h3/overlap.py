"""Plan field overlap = qkv: the heads of one message travel while the next ones are projected.

A block's QKV weight is cut into as many linears as Ulysses has messages, each with the output rows
of the heads that travel together, in the order in which they are sent. So each is projected,
normalised, rotated and sent before the next is begun. A GEMM's output features do not depend on
each other: on the CPU the bits stay (tests/unit/test_parallel_overlap.py); cuBLAS may choose
another kernel for fewer of them, and that one may add up in another order. What is quantised at
each use is quantised once per message.

R own rows, H heads, h heads of a message, d head dim, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.h3.config import NORM_EPS
from runtime.h3.linears import Linears, named, narrow_layers
from runtime.h3.model import Attention, H3Model
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.fp8_dynamic import FP8DynamicLinear
from runtime.kernels.linear.packed import AmaxLinear, ShareAmax
from runtime.kernels.scaled import Scaled
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.parallel.mesh import Mesh
from runtime.parallel.tensor import outputs_of
from runtime.parallel.turns import HALVES, alone, heads_of, turns
from runtime.parallel.ulysses import Ulysses

_QKV = "attn.qkv_proj"


class QKVTurns(nn.Module):
    """One linear per message."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x_RD: Tensor | Scaled, turn: int) -> Tensor:
        """[R, 3*h*d] of that message: q, k and v of its heads."""
        result: Tensor = self.linears[turn](x_RD)
        return result

    @property
    def takes_rows(self) -> bool:
        """FP8 rows that the step before has quantised, for all messages."""
        return all(isinstance(x, FP8DynamicLinear) and x.takes_rows for x in self.linears)

    def share_amax(self, share: ShareAmax) -> None:
        """All linears have the same input: the ranks are asked for its largest value once."""
        once = _Once(share)
        for turn, linear in enumerate(self.linears):
            if isinstance(linear, AmaxLinear):
                linear.share_amax = once.again if turn else once.first


class _Once:
    def __init__(self, share: ShareAmax) -> None:
        self._share = share
        self._kept: Tensor | None = None

    def first(self, amax: Tensor) -> Tensor:
        self._kept = self._share(amax)
        return self._kept

    def again(self, amax: Tensor) -> Tensor:
        assert self._kept is not None, "the first message comes first"
        return self._kept


def overlaps(plan: Plan, mesh: Mesh) -> bool:
    """Is there something to overlap?"""
    return plan.overlap == "qkv" and mesh.rows.size > 1


def in_turns(
    model: H3Model, layers: Mapping[str, LayerQuant], plan: Plan, linears: Linears, mesh: Mesh
) -> Linears:
    """What builds each block's QKV as QKVTurns. layers: the quantised ones of the file.

    Unavailable for a backend that scales a weight by all of it: a part would get another scale.
    """
    layers_QKV = frozenset(name for name in narrow_layers(model) if name.endswith(_QKV))
    for layer in sorted(layers_QKV):
        quant = layers.get(layer, LayerQuant(format=UNQUANTISED))
        backend = linear_backend(named(plan)[quant.format])
        if backend.narrows and backend.scales_all_rows and not quant.full_precision:
            raise Unavailable(
                "overlap qkv",
                f"{backend.name} scales the weight of {layer} by its largest value, which parts of "
                f"it do not share; choose overlap off, or another backend",
            )
    width = model.cfg.head_dim

    def build(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
        if packed.layer not in layers_QKV:
            return linears.build(packed, replaced)
        third = packed.shape[0] // 3
        parts = [
            [
                slice(first + heads.start * width, first + heads.stop * width)
                for first in (0, third, 2 * third)
                for heads in heads_of(turn)
            ]
            for turn in turns(third // width, mesh.rows.size, HALVES)
        ]
        return QKVTurns([linears.build(outputs_of(packed, part), replaced) for part in parts])

    return Linears(build=build, converted=linears.converted)


def overlap(attn: Attention, ulysses: Ulysses) -> None:
    """From now on this block's attention, whose QKV is built in turns, sends each as it is made."""
    attn.forward = functools.partial(_forward, attn, ulysses)  # type: ignore[method-assign]


def _forward(attn: Attention, ulysses: Ulysses, x_RD: Tensor | Scaled, rope: Tensor) -> Tensor:
    """Attention.forward on this rank's rows."""
    there, num_rows = [], rope.shape[1]
    for number, turn in enumerate(ulysses.turns(attn.heads)):
        qkv = attn.qkv_proj(x_RD, number).unflatten(-1, (3, -1, attn.head_dim))
        q, k, _ = qkv.unbind(1)
        attn.ops.rms_rope(q, k, rope, attn.q_norm.weight, attn.k_norm.weight, NORM_EPS)
        there.append(ulysses.send(qkv, alone(turn), number))
    shape = (1, attn.heads, num_rows, attn.head_dim)
    return attn.out_proj(ulysses.attended(there, shape)[0])
