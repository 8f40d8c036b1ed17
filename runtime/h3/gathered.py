"""Plan field gather = packed_nvfp4: all rows of a block are projected by every rank, to its heads.

In place of Q, K and V of the rank's rows, their packed NVFP4 input goes to all ranks
(runtime/parallel/packed_rows.py), and each multiplies all rows by its own heads' part of the
weight: as many products as before. So the integers that are multiplied are one rank's, whatever
the number of ranks; Q, K and V are too, but for the order in which a GEMM over other columns of the
weight may add: the CPU's reference of fp32 sums stays bit-equal here, cuBLASLt is not asked yet.
The heads' outputs travel back packed as well, by the scale of all ranks' largest: a head is whole
blocks of 16 values, so they are the integers that out_proj would make of them.

Only nvfp4_native multiplies what is packed; its activations are rounded in any case. S rows, R own
rows, h own heads of H, d head dim, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.h3.linears import Linears, narrow_layers
from runtime.h3.model import Attention, H3Model
from runtime.kernels.attention.base import Attend
from runtime.kernels.linear.nvfp4_native import NVFP4NativeLinear, NVFP4Rows
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.parallel.mesh import Mesh
from runtime.parallel.packed_rows import Gather, Return, not_gathered
from runtime.parallel.shares import head_shares, ranges
from runtime.parallel.tensor import PartialSum, outputs_of, repeated

_QKV, _OUT = "attn.qkv_proj", "attn.out_proj"


class GatheredQKV(nn.Module):
    """From R own rows to Q, K and V of all S rows, of this rank's heads."""

    def __init__(self, linear: NVFP4NativeLinear) -> None:
        super().__init__()
        self.linear = linear
        self.gather: Gather = not_gathered

    def forward(self, x_RD: Tensor) -> Tensor:
        """[R, D] -> [S, 3*h*d]."""
        return self.linear.multiplied(self.gather(self.linear.packed_rows(x_RD)))


class PackedOut(nn.Module):
    """From packed R rows of all heads to the hidden ones: what `packed` has made, multiplied."""

    def __init__(self, linear: NVFP4NativeLinear, heads: Sequence[int], rank: int) -> None:
        """heads: of each rank, by place among those that share rows; rank: this one's."""
        super().__init__()
        self.linear, self._rank = linear, rank
        width = linear.in_features // sum(heads)
        self._widths = [count * width for count in heads]

    def packed(self, out_SD: Tensor, back: Return) -> NVFP4Rows:
        """All rows of the own heads, [S, h*d], to own rows of all heads."""
        own = self.linear.packed_rows(out_SD, ranges(self._widths)[self._rank])
        return back(own, self._widths)

    def forward(self, rows: NVFP4Rows) -> Tensor:
        """R rows -> [R, D]."""
        return self.linear.multiplied(rows)


class PackedAttend:
    """An Attend over all rows of this rank's heads, whose output is what PackedOut multiplies."""

    def __init__(self, attend: Attend, out: PackedOut, back: Return) -> None:
        self._attend, self._out, self._back = attend, out, back

    def __call__(self, q_BhSd: Tensor, k_BhSd: Tensor, v_BhSd: Tensor) -> tuple[NVFP4Rows]:
        """One, as there is one in a batch."""
        return (self._out.packed(self._attend(q_BhSd, k_BhSd, v_BhSd)[0], self._back),)


def gathers(plan: Plan, mesh: Mesh) -> bool:
    """Is there something to gather?"""
    return plan.gather == "packed_nvfp4" and mesh.rows.size > 1


def own_heads(
    model: H3Model, layers: Mapping[str, LayerQuant], linears: Linears, mesh: Mesh
) -> Linears:
    """What builds each block's QKV as GatheredQKV, its out_proj as PackedOut. layers: the quantised
    ones of the file.

    Unavailable for one whose input is not packed to NVFP4, ValueError for too few heads.
    """
    packed_layers = frozenset(n for n in narrow_layers(model) if n.endswith((_QKV, _OUT)))
    for layer in sorted(packed_layers):
        quant = layers.get(layer, LayerQuant(format=UNQUANTISED))
        if quant.format != "nvfp4" or quant.full_precision:
            kept = " at full precision" if quant.full_precision else ""
            raise Unavailable(
                "gather packed_nvfp4",
                f"layer {layer} is stored as {quant.format}{kept}, whose input is not packed; "
                f"choose gather heads",
            )
    width, size, rank = model.cfg.head_dim, mesh.rows.size, mesh.rows.rank

    def build(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
        if packed.layer not in packed_layers:
            return linears.build(packed, replaced)
        if packed.layer.endswith(_OUT):
            linear = linears.build(packed, replaced)
            assert isinstance(linear, NVFP4NativeLinear), "a plan with gather names nvfp4_native"
            return PackedOut(linear, head_shares(packed.shape[1] // width, size), rank)
        third = packed.shape[0] // 3
        own = ranges(head_shares(third // width, size))[rank]
        parts = repeated(slice(own.start * width, own.stop * width), 3, third)
        linear = linears.build(outputs_of(packed, parts), replaced)
        assert isinstance(linear, NVFP4NativeLinear), "a plan with gather names nvfp4_native"
        return GatheredQKV(linear)

    return Linears(build=build, converted=linears.converted)


def gather_rows(attn: Attention, attend: Attend, gather: Gather, back: Return, mesh: Mesh) -> bool:
    """From now on an attention whose QKV is GatheredQKV has all rows of its heads; was it one?

    attend: over all rows.
    """
    if not isinstance(attn.qkv_proj, GatheredQKV):
        return False
    attn.qkv_proj.gather = gather
    out = attn.out_proj.linear if isinstance(attn.out_proj, PartialSum) else attn.out_proj
    assert isinstance(out, PackedOut), "own_heads builds both"
    # the model hands it to out_proj and to nothing else, so its type may differ
    attn.attend = cast(Attend, PackedAttend(attend, out, back))
    attn.heads = head_shares(attn.heads, mesh.rows.size)[mesh.rows.rank]
    return True
