"""Plan field memory = low: a block whose activations are given back as soon as they are used.

The same operations on the same operands, after KJ's memory discipline for H3 (performance.md 1.10):
the normed rows go after the QKV projection, attention runs in groups of heads and writes over Q,
QKV goes before the output projection, the MLP runs in groups of rows and writes over its input.
Heads and rows do not depend on each other, so the bits stay, but for one operation: a matmul over
fewer rows may run as another kernel of the BLAS, which adds its products in another order. On the
CPU the tiny model stays bit-equal in bf16; in fp32 groups of 16 rows move a block by 7e-8 relative.
tests/gpu/test_lifetime.py measures a GPU. S rows, H heads, d width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, LayerQuant
from runtime.h3.config import NORM_EPS
from runtime.h3.linears import named, narrow_layers
from runtime.h3.model import MLP, Attention, Block, H3Model, RowSpan
from runtime.kernels.linear import linear_backend
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan

HEAD_GROUPS = 4
GROUP_ROWS = 4096  # of the MLP: its hidden widths take 0.47 GB in bf16, and a GEMM stays large
_ROW_GROUPED = ("mlp.fc1", "mlp.fc2")

Owned = list[Tensor]  # of one tensor, whose only reference the callee takes out


def check(model: H3Model, layers: Mapping[str, LayerQuant], plan: Plan) -> None:
    """Unavailable if an MLP layer would get its activations' scale from all rows at once.

    layers: the quantised ones of the file.
    """
    backends = named(plan)
    for layer in sorted(narrow_layers(model)):
        quant = layers.get(layer, LayerQuant(format=UNQUANTISED))
        if not layer.endswith(_ROW_GROUPED) or quant.full_precision:
            continue
        backend = linear_backend(backends[quant.format])
        if backend.scales_all_rows:
            raise Unavailable(
                "memory low",
                f"{backend.name} scales the activations of {layer} by the largest of all rows and "
                f"memory low gives it groups of them; choose memory plain, or another backend",
            )


def lower(model: H3Model) -> None:
    """Every block of the stack runs as `forward` below; the refiner's few rows stay as they are."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.forward = functools.partial(forward, block)  # type: ignore[method-assign]


def forward(
    block: Block, x_SD: Tensor, tables: Sequence[Tensor], spans: Sequence[RowSpan], rope: Tensor
) -> Tensor:
    """Block.forward with other lifetimes; x_SD is written over."""
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = tables
    ops = block.ops
    y = [ops.norm_modulate(block.norm1, x_SD, shift_msa, scale_msa, spans)]
    y = [
        ops.gated_add_norm(
            x_SD,
            _attention(block.attn, y, rope),
            gate_msa,
            block.norm2,
            shift_mlp,
            scale_mlp,
            spans,
        )
    ]
    return ops.gated_add(x_SD, _mlp(block.mlp, y), gate_mlp, spans)


def _attention(attn: Attention, hidden: Owned, rope: Tensor) -> Tensor:
    joined = [_attended(attn, attn.qkv_proj(hidden.pop()), rope)]
    return attn.out_proj(joined.pop())


def _attended(attn: Attention, qkv: Tensor, rope: Tensor) -> Tensor:
    """[S, H*d]; each group's output takes the place of its queries."""
    q, k, v = (t.unflatten(-1, (attn.heads, attn.head_dim)) for t in qkv.chunk(3, dim=-1))
    for rows in _groups(len(qkv), GROUP_ROWS):  # eager forms hold several widths of q meanwhile
        attn.ops.rms_rope(
            q[rows], k[rows], rope[:, rows], attn.q_norm.weight, attn.k_norm.weight, NORM_EPS
        )
    for heads in _groups(attn.heads, -(-attn.heads // HEAD_GROUPS)):
        _attend_heads(attn, q[:, heads], k[:, heads], v[:, heads])
    return q.flatten(1).contiguous()


def _attend_heads(attn: Attention, q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor) -> None:
    out = attn.attend(*(t[None].transpose(1, 2) for t in (q_SHd, k_SHd, v_SHd)))
    q_SHd.copy_(out[0].unflatten(-1, q_SHd.shape[1:]))


def _mlp(mlp: MLP, hidden: Owned) -> Tensor:
    y_SD = hidden.pop()
    for rows in _groups(len(y_SD), GROUP_ROWS):
        y_SD[rows] = mlp.fc2(mlp.ops.swiglu(mlp.fc1(y_SD[rows])))
    return y_SD


def _groups(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
