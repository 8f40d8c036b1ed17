"""Triton kernels of the video VAE's decoder (contract 6.4); needs `triton`.

`enable_fp_fusion=False` for the reason of triton_kernels.py. exp and the quotient of silu are
CUDA's own, as in torch: of fp16 results an approximation would move one in some ten thousand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from runtime.kernels.elementwise.triton_kernels import require_layout

WARPS_OF_A_ROW = 8
COLUMNS = 2048  # of the SwiGLU, per program
HEADS = 16  # of the rotation, per program


@triton.jit
def _norm_row(x, weight, y, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    v = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(v * v, axis=0) / C + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * C + cols, (v * rstd * w).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _scaled_add_row(x, o, scale, C, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    s = tl.load(scale + cols, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(o + row * C + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * C + cols, tl.fma(u, s, v).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_part(gate_up, h, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    dtype = h.dtype.element_ty
    g = tl.load(gate_up + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    a = tl.math.div_rn(g, 1.0 + libdevice.exp(-g)).to(dtype).to(tl.float32)
    tl.store(h + row * F + cols, (a * u).to(dtype), mask=mask)


@triton.jit
def _rotate_heads(
    base,
    is_head,
    cos,
    minus_sin,
    sin,
    cos_again,
    eps,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    TAIL: tl.constexpr,
):
    pairs = tl.arange(0, PAIRS_POW2)
    tail = 2 * PAIRS + tl.arange(0, TAIL)
    d: tl.constexpr = 2 * PAIRS + TAIL
    dtype = base.dtype.element_ty
    both = is_head & (pairs < PAIRS)[None, :]
    low = tl.load(base + pairs[None, :], mask=both, other=0.0).to(tl.float32)
    high = tl.load(base + PAIRS + pairs[None, :], mask=both, other=0.0).to(tl.float32)
    rest = tl.load(base + tail[None, :], mask=is_head, other=0.0).to(tl.float32)
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1) + tl.sum(rest * rest, axis=1)
    rstd = tl.math.rsqrt(squares / d + eps)[:, None]
    low = (low * rstd).to(dtype).to(tl.float32)
    high = (high * rstd).to(dtype).to(tl.float32)
    a = (cos * low).to(dtype).to(tl.float32) + (minus_sin * high).to(dtype).to(tl.float32)
    b = (sin * low).to(dtype).to(tl.float32) + (cos_again * high).to(dtype).to(tl.float32)
    tl.store(base + pairs[None, :], a.to(dtype), mask=both)
    tl.store(base + PAIRS + pairs[None, :], b.to(dtype), mask=both)
    tl.store(base + tail[None, :], (rest * rstd).to(dtype), mask=is_head)


@triton.jit
def _rms_rope_row(
    q,
    k,
    table,
    row_stride,
    head_stride,
    N,
    H,
    eps,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_POW2: tl.constexpr,
    TAIL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS_POW2)
    is_head, is_pair = (heads < H)[:, None], pairs < PAIRS
    matrix = table + ((row % N) * PAIRS + pairs) * 4
    cos = tl.load(matrix, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    minus_sin = tl.load(matrix + 1, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(matrix + 2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    cos_again = tl.load(matrix + 3, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    at = row * row_stride + heads[:, None] * head_stride
    _rotate_heads(q + at, is_head, cos, minus_sin, sin, cos_again, eps, PAIRS, PAIRS_POW2, TAIL)
    _rotate_heads(k + at, is_head, cos, minus_sin, sin, cos_again, eps, PAIRS, PAIRS_POW2, TAIL)


def norm(x_BNC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """RMSNorm with weight, rounded once: a new [B,N,C]."""
    require_layout(x_BNC.is_contiguous(), x_BNC)
    y_BNC = torch.empty_like(x_BNC)
    width = x_BNC.shape[-1]
    _norm_row[(x_BNC.numel() // width,)](
        x_BNC,
        weight_C,
        y_BNC,
        width,
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )
    return y_BNC


def scaled_add(x_BNC: Tensor, o_BNC: Tensor, scale_C: Tensor) -> None:
    """x += o * scale in place, rounded once."""
    require_layout(x_BNC.is_contiguous() and o_BNC.is_contiguous(), x_BNC, o_BNC)
    width = x_BNC.shape[-1]
    _scaled_add_row[(x_BNC.numel() // width,)](
        x_BNC,
        o_BNC,
        scale_C,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )


def swiglu(gate_up_BN2F: Tensor) -> Tensor:
    """silu(gate), rounded, times up: a new [B,N,F]."""
    require_layout(gate_up_BN2F.is_contiguous(), gate_up_BN2F)
    width = gate_up_BN2F.shape[-1] // 2
    h_BNF = gate_up_BN2F.new_empty((*gate_up_BN2F.shape[:-1], width))
    grid = (h_BNF.numel() // width, triton.cdiv(width, COLUMNS))
    _swiglu_part[grid](
        gate_up_BN2F, h_BNF, width, BLOCK=COLUMNS, num_warps=8, enable_fp_fusion=False
    )
    return h_BNF


def rms_rope(q_BNHd: Tensor, k_BNHd: Tensor, table_1N1R22: Tensor, eps: float) -> None:
    """Normalises and rotates q and k in place; both lie alike, values of a head together."""
    batch, tokens, heads, width = q_BNHd.shape
    pairs = table_1N1R22.shape[3]
    tail = width - 2 * pairs
    fits = (
        q_BNHd.stride() == k_BNHd.stride()
        and q_BNHd.stride(3) == 1
        and q_BNHd.stride(0) == tokens * q_BNHd.stride(1)
        and table_1N1R22.is_contiguous()
        and tail & (tail - 1) == 0 < tail
    )
    require_layout(fits, q_BNHd, k_BNHd, table_1N1R22)
    _rms_rope_row[(batch * tokens, triton.cdiv(heads, HEADS))](
        q_BNHd,
        k_BNHd,
        table_1N1R22,
        q_BNHd.stride(1),
        q_BNHd.stride(2),
        tokens,
        heads,
        eps,
        HEADS=HEADS,
        PAIRS=pairs,
        PAIRS_POW2=triton.next_power_of_2(pairs),
        TAIL=tail,
        num_warps=4,
        enable_fp_fusion=False,
    )
