"""Triton kernels: norm with AdaLN, or SwiGLU, then e4m3 codes of the row; needs `triton`.

Values are rounded to bf16 where triton_kernels writes them, then scaled as triton_fp8 does: the
same expressions in the same order, in one pass (`enable_fp_fusion`: see triton_kernels).

S rows, D hidden, F hidden of the MLP, T rows of an AdaLN table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.elementwise.triton_kernels import (
    WARPS_OF_A_ROW,
    gated_sum,
    modulated,
    require_layout,
)
from runtime.kernels.linear.triton_fp8 import store_codes
from runtime.kernels.scaled import AMAX_FLOOR, E4M3_MAX, Scaled

SWIGLU_WARPS = 16


@triton.jit
def _norm_modulate_codes(
    x,
    weight,
    shift,
    scale,
    rows,
    codes,
    scales,
    D,
    table_stride,
    eps,
    FLOOR: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.max_contiguous(tl.arange(0, BLOCK), 8)  # the plain kernel's order of the sum
    mask = cols < D
    v = tl.load(x + row * D + cols, mask=mask, other=0.0)
    table = tl.load(rows + row).to(tl.int64) * table_stride
    made = modulated(v, weight, shift, scale, table, cols, mask, D, eps)
    store_codes(made.to(tl.float32), codes, scales, row, cols, mask, D, FLOOR, MOST)


@triton.jit
def _gated_add_norm_codes(
    x,
    o,
    gate,
    weight,
    shift,
    scale,
    rows,
    codes,
    scales,
    D,
    gate_stride,
    table_stride,
    eps,
    FLOOR: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.max_contiguous(tl.arange(0, BLOCK), 8)  # the plain kernel's order of the sum
    mask = cols < D
    table = tl.load(rows + row).to(tl.int64)
    at = row * D + cols
    total = gated_sum(x + at, o + at, gate + table * gate_stride + cols, mask)
    tl.store(x + at, total, mask=mask)
    table *= table_stride
    made = modulated(total, weight, shift, scale, table, cols, mask, D, eps)
    store_codes(made.to(tl.float32), codes, scales, row, cols, mask, D, FLOOR, MOST)


@triton.jit
def _swiglu_codes(
    gate_up, codes, scales, F, FLOOR: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < F
    dtype = gate_up.dtype.element_ty
    g = tl.load(gate_up + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    a = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    h = (a * u).to(dtype).to(tl.float32)
    store_codes(h, codes, scales, row, cols, mask, F, FLOOR, MOST)


def norm_modulate(
    x_SD: Tensor, weight_D: Tensor, eps: float, shift_TD: Tensor, scale_TD: Tensor, rows_S: Tensor
) -> Scaled:
    """[S, D] -> codes [S, D] and scales [S, 1]; rows_S int32 names each row's table row."""
    rows, width = x_SD.shape
    require_layout(x_SD.is_contiguous() and shift_TD.stride() == scale_TD.stride(), x_SD, shift_TD)
    made = _empty(rows, width, x_SD.device)
    _norm_modulate_codes[(rows,)](
        x_SD,
        weight_D,
        shift_TD,
        scale_TD,
        rows_S,
        made.codes,
        made.scale,
        width,
        shift_TD.stride(0),
        eps,
        FLOOR=AMAX_FLOOR,
        MOST=E4M3_MAX,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )
    return made


def gated_add_norm(
    x_SD: Tensor,
    o_SD: Tensor,
    gate_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    shift_TD: Tensor,
    scale_TD: Tensor,
    rows_S: Tensor,
) -> Scaled:
    """x += o * gate in place; the sum's norm_modulate as codes [S, D] and scales [S, 1]."""
    rows, width = x_SD.shape
    fits = x_SD.is_contiguous() and o_SD.is_contiguous()
    require_layout(fits and shift_TD.stride() == scale_TD.stride(), x_SD, o_SD, shift_TD)
    made = _empty(rows, width, x_SD.device)
    _gated_add_norm_codes[(rows,)](
        x_SD,
        o_SD,
        gate_TD,
        weight_D,
        shift_TD,
        scale_TD,
        rows_S,
        made.codes,
        made.scale,
        width,
        gate_TD.stride(0),
        shift_TD.stride(0),
        eps,
        FLOOR=AMAX_FLOOR,
        MOST=E4M3_MAX,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )
    return made


def swiglu(gate_up_S2F: Tensor) -> Scaled:
    """[S, 2F] -> codes [S, F] and scales [S, 1]."""
    rows, double = gate_up_S2F.shape
    require_layout(gate_up_S2F.is_contiguous(), gate_up_S2F)
    made = _empty(rows, double // 2, gate_up_S2F.device)
    _swiglu_codes[(rows,)](
        gate_up_S2F,
        made.codes,
        made.scale,
        double // 2,
        FLOOR=AMAX_FLOOR,
        MOST=E4M3_MAX,
        BLOCK=triton.next_power_of_2(double // 2),
        num_warps=SWIGLU_WARPS,
        enable_fp_fusion=False,
    )
    return made


def _empty(rows: int, width: int, device: torch.device) -> Scaled:
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    return Scaled(codes, torch.empty(rows, 1, dtype=torch.float32, device=device))
