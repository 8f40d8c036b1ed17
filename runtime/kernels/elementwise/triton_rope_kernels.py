"""Triton kernel of the denoiser's q/k norm and rotation (contract 1.14); needs `triton`.

`enable_fp_fusion=False` for the reason of triton_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.elementwise.triton_kernels import require_layout

HEADS = 8  # per program


@triton.jit
def _heads(base, is_head, PAIRS: tl.constexpr, PAIRS_POW2: tl.constexpr, TAIL: tl.constexpr):
    """fp32 of some heads: the first and the second value of every pair, and what is not rotated."""
    pairs = tl.arange(0, PAIRS_POW2)
    both = is_head & (pairs < PAIRS)[None, :]
    tail = 2 * PAIRS + tl.arange(0, TAIL)
    low = tl.load(base + pairs[None, :], mask=both, other=0.0).to(tl.float32)
    high = tl.load(base + PAIRS + pairs[None, :], mask=both, other=0.0).to(tl.float32)
    rest = tl.load(base + tail[None, :], mask=is_head, other=0.0).to(tl.float32)
    return low, high, rest


@triton.jit
def _rotate_heads(
    base,
    is_head,
    low,
    high,
    rest,
    cos,
    minus_sin,
    sin,
    cos_again,
    weight,
    eps,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    TAIL: tl.constexpr,
):
    pairs = tl.arange(0, PAIRS_POW2)
    tail = 2 * PAIRS + tl.arange(0, TAIL)
    d: tl.constexpr = 2 * PAIRS + TAIL
    dtype = base.dtype.element_ty
    is_pair = pairs < PAIRS
    both = is_head & is_pair[None, :]
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1) + tl.sum(rest * rest, axis=1)
    rstd = tl.math.rsqrt(squares / d + eps)[:, None]
    w_low = tl.load(weight + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    w_high = tl.load(weight + PAIRS + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    w_rest = tl.load(weight + tail).to(tl.float32)[None, :]
    low = (low * rstd * w_low).to(dtype).to(tl.float32)
    high = (high * rstd * w_high).to(dtype).to(tl.float32)
    a = (cos * low).to(dtype).to(tl.float32) + (minus_sin * high).to(dtype).to(tl.float32)
    b = (sin * low).to(dtype).to(tl.float32) + (cos_again * high).to(dtype).to(tl.float32)
    tl.store(base + pairs[None, :], a.to(dtype), mask=both)
    tl.store(base + PAIRS + pairs[None, :], b.to(dtype), mask=both)
    tl.store(base + tail[None, :], (rest * rstd * w_rest).to(dtype), mask=is_head)


@triton.jit
def _rms_rope_row(
    q,
    k,
    table,
    q_weight,
    k_weight,
    row_stride,
    head_stride,
    H,
    eps,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (heads < H)[:, None]
    at = row * row_stride + heads[:, None] * head_stride
    pairs = tl.arange(0, PAIRS_POW2)
    is_pair = pairs < PAIRS
    matrix = table + (row * PAIRS + pairs) * 4
    cos = tl.load(matrix, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    minus_sin = tl.load(matrix + 1, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(matrix + 2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    cos_again = tl.load(matrix + 3, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    # k is asked for before q is written: a store would hold the load back
    low, high, rest = _heads(q + at, is_head, PAIRS, PAIRS_POW2, TAIL)
    k_low, k_high, k_rest = _heads(k + at, is_head, PAIRS, PAIRS_POW2, TAIL)
    _rotate_heads(
        q + at,
        is_head,
        low,
        high,
        rest,
        cos,
        minus_sin,
        sin,
        cos_again,
        q_weight,
        eps,
        PAIRS,
        PAIRS_POW2,
        TAIL,
    )
    _rotate_heads(
        k + at,
        is_head,
        k_low,
        k_high,
        k_rest,
        cos,
        minus_sin,
        sin,
        cos_again,
        k_weight,
        eps,
        PAIRS,
        PAIRS_POW2,
        TAIL,
    )


def rms_rope(
    q_SHd: Tensor,
    k_SHd: Tensor,
    table_1S1R22: Tensor,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    eps: float,
) -> None:
    """Normalises and rotates both in place; they lie alike, values of a head together."""
    rows, heads, width = q_SHd.shape
    pairs = table_1S1R22.shape[3]
    tail = width - 2 * pairs
    fits = (
        q_SHd.shape == k_SHd.shape
        and q_SHd.stride() == k_SHd.stride()
        and q_SHd.stride(2) == 1
        and table_1S1R22.is_contiguous()
        and tail & (tail - 1) == 0 < tail
    )
    require_layout(fits, q_SHd, k_SHd, table_1S1R22)
    _rms_rope_row[(rows, triton.cdiv(heads, HEADS))](
        q_SHd,
        k_SHd,
        table_1S1R22,
        q_weight_d,
        k_weight_d,
        q_SHd.stride(0),
        q_SHd.stride(1),
        heads,
        eps,
        HEADS=HEADS,
        PAIRS=pairs,
        PAIRS_POW2=triton.next_power_of_2(pairs),
        TAIL=tail,
        num_warps=4,
        enable_fp_fusion=False,
    )
