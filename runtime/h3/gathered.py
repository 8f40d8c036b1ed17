"""Plan field gather = packed_nvfp4: all rows of a block are projected by every rank, to its heads.

In place of Q, K and V of the rank's rows, their packed NVFP4 input goes to all ranks
(runtime/parallel/packed_rows.py), and each multiplies all rows by its own heads' part of the
weight: as many products as before. So the integers that are multiplied are one rank's, whatever
the number of ranks; Q, K and V are too, but for the order in which a GEMM over other columns of the
weight may add: the CPU's reference of fp32 sums stays bit-equal here, cuBLASLt is not asked yet.
The heads' outputs travel back in the compute dtype.

Only nvfp4_native multiplies what is packed; its activations are rounded in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor, nn

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.h3.linears import Linears, narrow_layers
from runtime.h3.model import Attention, H3Model
from runtime.kernels.linear.nvfp4_native import NVFP4NativeLinear
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.parallel.mesh import Mesh
from runtime.parallel.packed_rows import Gather, not_gathered
from runtime.parallel.shares import head_shares, ranges
from runtime.parallel.tensor import outputs_of, repeated
from runtime.parallel.ulysses import Ulysses

_QKV = "attn.qkv_proj"


class GatheredQKV(nn.Module):
    """From R own rows to Q, K and V of all S rows, of this rank's heads."""

    def __init__(self, linear: NVFP4NativeLinear) -> None:
        super().__init__()
        self.linear = linear
        self.gather: Gather = not_gathered

    def forward(self, x_RD: Tensor) -> Tensor:
        """[R, D] -> [S, 3*h*d]."""
        return self.linear.multiplied(self.gather(self.linear.packed_rows(x_RD)))


def gathers(plan: Plan, mesh: Mesh) -> bool:
    """Is there something to gather?"""
    return plan.gather == "packed_nvfp4" and mesh.rows.size > 1


def own_heads(
    model: H3Model, layers: Mapping[str, LayerQuant], linears: Linears, mesh: Mesh
) -> Linears:
    """What builds each block's QKV as GatheredQKV. layers: the quantised ones of the file.

    Unavailable for a QKV whose input is not packed to NVFP4, ValueError for too few heads.
    """
    layers_QKV = frozenset(name for name in narrow_layers(model) if name.endswith(_QKV))
    for layer in sorted(layers_QKV):
        quant = layers.get(layer, LayerQuant(format=UNQUANTISED))
        if quant.format != "nvfp4" or quant.full_precision:
            kept = " at full precision" if quant.full_precision else ""
            raise Unavailable(
                "gather packed_nvfp4",
                f"layer {layer} is stored as {quant.format}{kept}, whose input is not packed; "
                f"choose gather heads",
            )
    width = model.cfg.head_dim

    def build(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
        if packed.layer not in layers_QKV:
            return linears.build(packed, replaced)
        third = packed.shape[0] // 3
        own = ranges(head_shares(third // width, mesh.rows.size))[mesh.rows.rank]
        parts = repeated(slice(own.start * width, own.stop * width), 3, third)
        linear = linears.build(outputs_of(packed, parts), replaced)
        assert isinstance(linear, NVFP4NativeLinear), "a plan with gather names nvfp4_native"
        return GatheredQKV(linear)

    return Linears(build=build, converted=linears.converted)


def gather_rows(attn: Attention, ulysses: Ulysses, gather: Gather, mesh: Mesh) -> bool:
    """From now on an attention whose QKV is GatheredQKV has all rows of its heads; was it one?"""
    if not isinstance(attn.qkv_proj, GatheredQKV):
        return False
    attn.qkv_proj.gather = gather
    attn.attend = functools.partial(ulysses.over_all_rows, num_heads=attn.heads)
    attn.heads = head_shares(attn.heads, mesh.rows.size)[mesh.rows.rank]
    return True
