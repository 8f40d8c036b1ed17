"""SageAttention's arithmetic in PyTorch: INT8 scores, FP16 or FP8 values, as each kernel has it.

For CPUs and tests. Every quantisation rounds as its kernel does; the sum over one tile of keys is
taken in fp32 and, where the tensor core adds in FP16, rounded once. Written from the published
papers (SageAttention, 2 and 2++) and the 1.0.6 wheel. H heads, S rows, N tiles or blocks, d width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_E4M3_MAX = 448.0
_P_OFFSET = 8.807  # exp2 of it is just under e4m3's 448: probabilities fill the range
_SMALLEST = 1e-7  # of a scale: a block of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMaths:
    """One kernel. Rows of a block share a scale; `per_thread`: 8 scales of queries, 4 of keys.

    Per thread, row i of a block belongs to scale i % 8, key j to scale (j % 8) // 2.
    """

    query_block: int
    key_block: int
    per_thread: bool
    fused_mean: bool  # K minus its mean in fp32, half to even; else rounded first, half away
    tile: int  # keys between two updates of the running maximum
    fp8_values: bool  # else FP16
    value_limit: float = _E4M3_MAX  # of FP8 values; 2.25 keeps a tile's sum in FP16's range
    fp16_sums: bool = False
    masked_tail: bool = True  # False: the last tile is filled with keys of logit 0 and value 0


SAGE1 = SageMaths(
    query_block=128,
    key_block=64,
    per_thread=False,
    fused_mean=False,
    tile=64,
    fp8_values=False,
    fp16_sums=True,
    masked_tail=False,
)
FP16_TRITON = SageMaths(
    query_block=128,
    key_block=64,
    per_thread=False,
    fused_mean=False,
    tile=64,
    fp8_values=False,
    fp16_sums=True,
)
FP16_CUDA = SageMaths(
    query_block=32, key_block=64, per_thread=True, fused_mean=False, tile=64, fp8_values=False
)
FP8_FP32 = SageMaths(
    query_block=32, key_block=64, per_thread=True, fused_mean=False, tile=64, fp8_values=True
)
FP8_FP16 = SageMaths(
    query_block=32,
    key_block=64,
    per_thread=True,
    fused_mean=False,
    tile=64,
    fp8_values=True,
    value_limit=2.25,
    fp16_sums=True,
)
FP8_SM90 = SageMaths(
    query_block=16, key_block=128, per_thread=True, fused_mean=False, tile=128, fp8_values=True
)
FP8_SM120 = SageMaths(
    query_block=32,
    key_block=64,
    per_thread=False,
    fused_mean=True,
    tile=64,
    fp8_values=True,
    value_limit=2.25,
    fp16_sums=True,
)


def sage_attention(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, maths: SageMaths) -> Tensor:
    """q, k, v [B, H, S, d] of one half type -> [B, S, H*d] in it; none of them is written.

    k and v may have another number of rows than q.
    """
    tiles = [
        _tile(q_HSd, k_HSd, v_HSd, maths)
        for q_HSd, k_HSd, v_HSd in zip(q_BHSd, k_BHSd, v_BHSd, strict=True)
    ]
    return torch.stack(tiles)


def _tile(q_HSd: Tensor, k_HSd: Tensor, v_HSd: Tensor, maths: SageMaths) -> Tensor:
    """[S, H*d]."""
    dtype, k_HSd = q_HSd.dtype, _without_mean(k_HSd, maths)
    width = q_HSd.shape[-1]
    q_codes, q_scale_HS1 = _quantised(q_HSd.float(), maths.query_block, maths, pairs=False)
    k_codes, k_scale_HS1 = _quantised(k_HSd, maths.key_block, maths, pairs=True)
    values_HSd, value_scale_H1d = _values(v_HSd, maths)
    q_scale_HS1 = q_scale_HS1 * (math.log2(math.e) / math.sqrt(width))
    offset = _P_OFFSET if maths.fp8_values else 0.0
    top_HS1 = torch.full_like(q_scale_HS1, -math.inf)
    sum_HS1 = torch.zeros_like(q_scale_HS1)
    out_HSd = torch.zeros_like(q_codes)
    num_keys = k_HSd.shape[-2]
    for start in range(0, num_keys, maths.tile):
        keys = slice(start, min(start + maths.tile, num_keys))
        # whole numbers below 2**24: exact in fp32
        logits = (q_codes @ k_codes[:, keys].transpose(-1, -2)) * q_scale_HS1
        logits *= k_scale_HS1[:, keys].transpose(-1, -2)
        ghosts = 0 if maths.masked_tail else maths.tile - (keys.stop - start)
        logits = F.pad(logits, (0, ghosts))
        value = F.pad(values_HSd[:, keys], (0, 0, 0, ghosts))
        new_top = torch.maximum(top_HS1, logits.amax(-1, keepdim=True))
        p = torch.exp2(logits - new_top + offset)
        shrink = torch.exp2(top_HS1 - new_top)
        sum_HS1 = sum_HS1 * shrink + p.sum(-1, keepdim=True)
        tile_HSd = _rounded(p, maths.fp8_values) @ value
        if maths.fp16_sums:
            tile_HSd = tile_HSd.half().float()
        out_HSd = out_HSd * shrink + tile_HSd
        top_HS1 = new_top
    out_HSd = out_HSd / sum_HS1 * value_scale_H1d
    return out_HSd.to(dtype).transpose(0, 1).flatten(1)


def _without_mean(k_HSd: Tensor, maths: SageMaths) -> Tensor:
    """fp32. Softmax does not see what all keys have in common; INT8 does."""
    mean_H1d = k_HSd.mean(dim=-2, keepdim=True)
    if maths.fused_mean:
        return k_HSd.float() - mean_H1d.float()
    return (k_HSd - mean_H1d).float()


def _quantised(
    x_HSd: Tensor, block: int, maths: SageMaths, *, pairs: bool
) -> tuple[Tensor, Tensor]:
    """(whole numbers -127 to 127 in fp32, scales [H,S,1]) of fp32 rows."""
    rows = x_HSd.shape[-2]
    amax_HNB = F.pad(x_HSd.abs().amax(-1), (0, -rows % block)).unflatten(-1, (-1, block))
    row_B = torch.arange(block, device=x_HSd.device)
    group_B = torch.zeros_like(row_B)
    if maths.per_thread:
        group_B = row_B % 8 // 2 if pairs else row_B % 8
    index_HNB = group_B.expand_as(amax_HNB)
    shared = torch.zeros_like(amax_HNB).scatter_reduce(-1, index_HNB, amax_HNB, "amax")
    scale_HS1 = shared.gather(-1, index_HNB).flatten(-2)[:, :rows, None] / 127.0
    scale_HS1 = scale_HS1.clamp(min=_SMALLEST)
    quotient = x_HSd / scale_HS1
    if maths.fused_mean:
        return quotient.round(), scale_HS1
    return (quotient + torch.where(quotient >= 0, 0.5, -0.5)).trunc(), scale_HS1


def _values(v_HSd: Tensor, maths: SageMaths) -> tuple[Tensor, Tensor]:
    """(fp32 numbers that the format holds, scale per channel [H,1,d])."""
    v_HSd = v_HSd.float()
    if not maths.fp8_values:
        return v_HSd.half().float(), torch.ones_like(v_HSd[:, :1])
    scale_H1d = v_HSd.abs().amax(-2, keepdim=True).clamp(min=_SMALLEST) / maths.value_limit
    return _rounded(v_HSd / scale_H1d, fp8=True), scale_H1d


def _rounded(x: Tensor, fp8: bool) -> Tensor:
    return (
        x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float() if fp8 else x.half().float()
    )
