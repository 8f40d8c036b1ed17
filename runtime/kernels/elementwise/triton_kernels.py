"""Triton kernels of the denoiser's elementwise steps (contract 1.13 to 1.15); needs `triton`.

`enable_fp_fusion=False` everywhere: LLVM narrows bf16(a * b) to a bf16 product and would contract
it with the following sum into one bf16 fma, which skips a rounding (30 % of the values differed).
Where one rounding is wanted the fma is written out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS_OF_A_ROW = 8
COLUMNS = 2048  # of the SwiGLU, per program
HEADS = 8  # of the rotation, per program


@triton.jit
def _norm_modulate_row(x, weight, shift, scale, rows, y, D, table_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    dtype = y.dtype.element_ty
    v = tl.load(x + row * D + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(v * v, axis=0) / D + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    table = tl.load(rows + row).to(tl.int64) * table_stride
    s = tl.load(scale + table + cols, mask=mask, other=0.0).to(dtype).to(tl.float32)
    b = tl.load(shift + table + cols, mask=mask, other=0.0).to(dtype).to(tl.float32)
    normed = (v * rstd * w).to(dtype).to(tl.float32)
    factor = (1.0 + s).to(dtype).to(tl.float32)
    scaled = (normed * factor).to(dtype).to(tl.float32)
    tl.store(y + row * D + cols, (scaled + b).to(dtype), mask=mask)


@triton.jit
def _gated_add_row(x, o, gate, rows, D, table_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    dtype = x.dtype.element_ty
    table = tl.load(rows + row).to(tl.int64) * table_stride
    g = tl.load(gate + table + cols, mask=mask, other=0.0).to(dtype).to(tl.float32)
    v = tl.load(x + row * D + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(o + row * D + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * D + cols, tl.fma(u, g, v).to(dtype), mask=mask)


@triton.jit
def _swiglu_part(gate_up, h, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    dtype = h.dtype.element_ty
    g = tl.load(gate_up + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    a = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(h + row * F + cols, (a * u).to(dtype), mask=mask)


@triton.jit
def _rms_rope_heads(
    x,
    table,
    weight,
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
    pairs = tl.arange(0, PAIRS_POW2)
    tail = 2 * PAIRS + tl.arange(0, TAIL)
    d: tl.constexpr = 2 * PAIRS + TAIL
    dtype = x.dtype.element_ty
    is_head, is_pair = (heads < H)[:, None], pairs < PAIRS
    both = is_head & is_pair[None, :]
    base = x + row * row_stride + heads[:, None] * head_stride
    low = tl.load(base + pairs[None, :], mask=both, other=0.0).to(tl.float32)
    high = tl.load(base + PAIRS + pairs[None, :], mask=both, other=0.0).to(tl.float32)
    rest = tl.load(base + tail[None, :], mask=is_head, other=0.0).to(tl.float32)
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1) + tl.sum(rest * rest, axis=1)
    rstd = tl.math.rsqrt(squares / d + eps)[:, None]
    w_low = tl.load(weight + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    w_high = tl.load(weight + PAIRS + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    w_rest = tl.load(weight + tail).to(tl.float32)[None, :]
    low = (low * rstd * w_low).to(dtype).to(tl.float32)
    high = (high * rstd * w_high).to(dtype).to(tl.float32)
    matrix = table + (row * PAIRS + pairs) * 4
    cos = tl.load(matrix, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    minus_sin = tl.load(matrix + 1, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(matrix + 2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    cos_again = tl.load(matrix + 3, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    a = (cos * low).to(dtype).to(tl.float32) + (minus_sin * high).to(dtype).to(tl.float32)
    b = (sin * low).to(dtype).to(tl.float32) + (cos_again * high).to(dtype).to(tl.float32)
    tl.store(base + pairs[None, :], a.to(dtype), mask=both)
    tl.store(base + PAIRS + pairs[None, :], b.to(dtype), mask=both)
    tl.store(base + tail[None, :], (rest * rstd * w_rest).to(dtype), mask=is_head)


def norm_modulate(
    x_SD: Tensor, weight_D: Tensor, eps: float, shift_TD: Tensor, scale_TD: Tensor, rows_S: Tensor
) -> Tensor:
    """A new [S, D]; rows_S int32 names each row's table row."""
    rows, width = x_SD.shape
    require_layout(x_SD.is_contiguous() and shift_TD.stride() == scale_TD.stride(), x_SD, shift_TD)
    y_SD = torch.empty_like(x_SD)
    _norm_modulate_row[(rows,)](
        x_SD,
        weight_D,
        shift_TD,
        scale_TD,
        rows_S,
        y_SD,
        width,
        shift_TD.stride(0),
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )
    return y_SD


def gated_add(x_SD: Tensor, o_SD: Tensor, gate_TD: Tensor, rows_S: Tensor) -> None:
    """x += o * gate in place."""
    rows, width = x_SD.shape
    require_layout(x_SD.is_contiguous() and o_SD.is_contiguous(), x_SD, o_SD)
    _gated_add_row[(rows,)](
        x_SD,
        o_SD,
        gate_TD,
        rows_S,
        width,
        gate_TD.stride(0),
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )


def swiglu(gate_up_S2F: Tensor) -> Tensor:
    """A new [S, F]."""
    rows, double = gate_up_S2F.shape
    require_layout(gate_up_S2F.is_contiguous(), gate_up_S2F)
    h_SF = torch.empty(rows, double // 2, dtype=gate_up_S2F.dtype, device=gate_up_S2F.device)
    grid = (rows, triton.cdiv(double // 2, COLUMNS))
    _swiglu_part[grid](
        gate_up_S2F, h_SF, double // 2, BLOCK=COLUMNS, num_warps=8, enable_fp_fusion=False
    )
    return h_SF


def rms_rope(x_SHd: Tensor, table_1S1R22: Tensor, weight_d: Tensor, eps: float) -> None:
    """Normalises and rotates in place; heads may lie anywhere, values of a head together."""
    rows, heads, width = x_SHd.shape
    pairs = table_1S1R22.shape[3]
    tail = width - 2 * pairs
    fits = x_SHd.stride(2) == 1 and table_1S1R22.is_contiguous() and tail & (tail - 1) == 0 < tail
    require_layout(fits, x_SHd, table_1S1R22)
    _rms_rope_heads[(rows, triton.cdiv(heads, HEADS))](
        x_SHd,
        table_1S1R22,
        weight_d,
        x_SHd.stride(0),
        x_SHd.stride(1),
        heads,
        eps,
        HEADS=HEADS,
        PAIRS=pairs,
        PAIRS_POW2=triton.next_power_of_2(pairs),
        TAIL=tail,
        num_warps=4,
        enable_fp_fusion=False,
    )


def require_layout(fits: bool, *tensors: Tensor) -> None:
    """ValueError with the shapes and strides unless a kernel takes these tensors."""
    if not fits:
        shapes = ", ".join(f"{tuple(t.shape)} of strides {t.stride()}" for t in tensors)
        raise ValueError(f"the Triton kernels do not take tensors laid out like this: {shapes}")
