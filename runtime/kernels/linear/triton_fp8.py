"""Triton kernels that quantise activations to e4m3, a row per program; needs `triton`.

Codes and scales are those of fp8_dynamic's torch operations, bit for bit: the divisions are IEEE's
(`/` of a kernel is not), and a product that goes straight into a conversion has nothing that it
could be contracted with. A row stays in registers between its amax and its codes.

Axes: M rows, K input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.linear.packed import ShareAmax, unshared
from runtime.kernels.scaled import AMAX_FLOOR, E4M3_MAX, Scaled

WIDE = 8192  # columns from which a row gets 16 warps instead of 8


@triton.jit
def store_codes(v, codes, scales, row, cols, mask, K, FLOOR: tl.constexpr, MOST: tl.constexpr):
    """A row's fp32 values v as codes, and its scale."""
    amax = tl.maximum(tl.max(tl.abs(v), axis=0), FLOOR)
    tl.store(scales + row, tl.math.div_rn(amax, MOST))
    scaled = v * tl.math.div_rn(MOST, amax)
    tl.store(codes + row * K + cols, scaled.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def _quantise_row(
    x, codes, scales, K, row_stride, FLOOR: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    v = tl.load(x + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    store_codes(v, codes, scales, row, cols, mask, K, FLOOR, MOST)


@triton.jit
def _amax_of_row(x, amax, K, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    v = tl.load(x + row * row_stride + cols, mask=cols < K, other=0.0).to(tl.float32)
    tl.atomic_max(amax, tl.max(tl.abs(v), axis=0), sem="relaxed")


@triton.jit
def _quantise_by(x, codes, amax, scale, K, row_stride, MOST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < K
    most = tl.load(amax)
    if row == 0:
        tl.store(scale, tl.math.div_rn(most, MOST))
    v = tl.load(x + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scaled = v * tl.math.div_rn(MOST, most)
    tl.store(codes + row * K + cols, scaled.to(codes.dtype.element_ty), mask=mask)


def quantise_rows(x_MK: Tensor, share_amax: ShareAmax = unshared) -> Scaled:
    """Codes [M,K] and a scale per row [M,1]; one read of x. There is nothing to share."""
    del share_amax
    rows, width = _size(x_MK)
    codes_MK = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scales_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x_MK.device)
    _quantise_row[(rows,)](
        x_MK,
        codes_MK,
        scales_M1,
        width,
        x_MK.stride(0),
        FLOOR=AMAX_FLOOR,
        MOST=E4M3_MAX,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
        enable_fp_fusion=False,
    )
    return Scaled(codes_MK, scales_M1)


def quantise_tensor(x_MK: Tensor, share_amax: ShareAmax = unshared) -> Scaled:
    """Codes [M,K] and one scale []; x is read twice, and its amax shared between."""
    rows, width = _size(x_MK)
    codes_MK = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_MK.device)
    amax = torch.full((), AMAX_FLOOR, dtype=torch.float32, device=x_MK.device)
    scale = torch.empty_like(amax)
    block = triton.next_power_of_2(width)
    _amax_of_row[(rows,)](x_MK, amax, width, x_MK.stride(0), BLOCK=block, num_warps=_warps(width))
    amax = share_amax(amax)
    _quantise_by[(rows,)](
        x_MK,
        codes_MK,
        amax,
        scale,
        width,
        x_MK.stride(0),
        MOST=E4M3_MAX,
        BLOCK=block,
        num_warps=_warps(width),
        enable_fp_fusion=False,
    )
    return Scaled(codes_MK, scale)


def _warps(width: int) -> int:
    return 16 if width > WIDE else 8


def _size(x_MK: Tensor) -> tuple[int, int]:
    if x_MK.dim() != 2 or x_MK.stride(1) != 1:
        raise ValueError(
            f"the FP8 kernels take rows whose values lie together, got {tuple(x_MK.shape)} of "
            f"strides {x_MK.stride()}"
        )
    return x_MK.shape[0], x_MK.shape[1]
