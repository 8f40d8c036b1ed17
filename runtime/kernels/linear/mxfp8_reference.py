"""MXFP8 decoded to floating point: a tested reference; the loader refuses the format (8.5)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scale bytes from cuBLAS 128x4 tile order to [rows, columns] (contract 8.3)."""
    tiles_r, tiles_c = -(-rows // 128), -(-columns // 4)
    tiles = scales.reshape(tiles_r, tiles_c, 32, 4, 4)  # 512 bytes a tile: r%32, r//32, c%4
    return tiles.permute(0, 3, 2, 1, 4).reshape(tiles_r * 128, tiles_c * 4)[:rows, :columns]


def dequantise_mxfp8(weight_NK: Tensor, scales_u8: Tensor, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn codes times 2^(e - 127) per 32 columns; both factors cast to dtype first."""
    rows, columns = weight_NK.shape
    exponents = unswizzle(scales_u8, rows, columns // BLOCK).to(torch.int32) - 127
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).to(dtype)
    blocks = weight_NK.to(dtype).unflatten(1, (-1, BLOCK)) * scales.unsqueeze(-1)
    return blocks.flatten(1)
