"""Triton kernels of the denoiser's sums, norms and SwiGLU (contract 1.13, 1.15); needs `triton`.

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


@triton.jit
def modulated(x_row, weight, shift, scale, table, cols, mask, D, eps):
    """A row of the compute dtype through norm and modulation, each step rounded to it."""
    dtype = x_row.dtype
    v = x_row.to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(v * v, axis=0) / D + eps)
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(scale + table + cols, mask=mask, other=0.0).to(dtype).to(tl.float32)
    b = tl.load(shift + table + cols, mask=mask, other=0.0).to(dtype).to(tl.float32)
    normed = (v * rstd * w).to(dtype).to(tl.float32)
    factor = (1.0 + s).to(dtype).to(tl.float32)
    scaled = (normed * factor).to(dtype).to(tl.float32)
    return (scaled + b).to(dtype)


@triton.jit
def gated_sum(x_at, o_at, gate_at, mask):
    """x + o * gate with one rounding, in the dtype of x."""
    dtype = x_at.dtype.element_ty
    g = tl.load(gate_at, mask=mask, other=0.0).to(dtype).to(tl.float32)
    v = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(o_at, mask=mask, other=0.0).to(tl.float32)
    return tl.fma(u, g, v).to(dtype)


@triton.jit
def _norm_modulate_row(x, weight, shift, scale, rows, y, D, table_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    v = tl.load(x + row * D + cols, mask=mask, other=0.0)
    table = tl.load(rows + row).to(tl.int64) * table_stride
    made = modulated(v, weight, shift, scale, table, cols, mask, D, eps)
    tl.store(y + row * D + cols, made, mask=mask)


@triton.jit
def _gated_add_row(x, o, gate, rows, D, table_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    table = tl.load(rows + row).to(tl.int64) * table_stride
    at = row * D + cols
    tl.store(x + at, gated_sum(x + at, o + at, gate + table + cols, mask), mask=mask)


@triton.jit
def _gated_add_norm_row(
    x,
    o,
    gate,
    weight,
    shift,
    scale,
    rows,
    y,
    D,
    gate_stride,
    table_stride,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    table = tl.load(rows + row).to(tl.int64)
    at = row * D + cols
    total = gated_sum(x + at, o + at, gate + table * gate_stride + cols, mask)
    tl.store(x + at, total, mask=mask)
    table *= table_stride
    made = modulated(total, weight, shift, scale, table, cols, mask, D, eps)
    tl.store(y + at, made, mask=mask)


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


def gated_add_norm(
    x_SD: Tensor,
    o_SD: Tensor,
    gate_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    shift_TD: Tensor,
    scale_TD: Tensor,
    rows_S: Tensor,
) -> Tensor:
    """gated_add in place on x, and norm_modulate of the sum: a new [S, D]."""
    rows, width = x_SD.shape
    fits = x_SD.is_contiguous() and o_SD.is_contiguous()
    require_layout(fits and shift_TD.stride() == scale_TD.stride(), x_SD, o_SD, shift_TD)
    y_SD = torch.empty_like(x_SD)
    _gated_add_norm_row[(rows,)](
        x_SD,
        o_SD,
        gate_TD,
        weight_D,
        shift_TD,
        scale_TD,
        rows_S,
        y_SD,
        width,
        gate_TD.stride(0),
        shift_TD.stride(0),
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )
    return y_SD


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


def require_layout(fits: bool, *tensors: Tensor) -> None:
    """ValueError with the shapes and strides unless a kernel takes these tensors."""
    if not fits:
        shapes = ", ".join(f"{tuple(t.shape)} of strides {t.stride()}" for t in tensors)
        raise ValueError(f"the Triton kernels do not take tensors laid out like this: {shapes}")
