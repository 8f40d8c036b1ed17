"""FP4 attention in PyTorch, as SageAttention 3 publishes it: e2m1 numbers, an e4m3 scale per 16.

For CPUs and tests. Queries lose the mean of their block of 128 and keys the mean of all; the part
of the scores that the query mean carries is added back in fp32. Probabilities are quantised too,
scaled so that their block scales fill e4m3. Written from arXiv 2505.11594; tiles of the running
maximum are not modelled. H heads, S rows, d width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention.heads import head_by_head

QUERY_BLOCK = 128
SCALED = 16  # consecutive numbers under one scale
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The largest fp32 number that still rounds down to each level: ties go to the even code.
_LAST = (0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0)


def nvfp4_attention(
    q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, *, per_block_mean: bool
) -> Tensor:
    """q, k, v [B, H, S, d] of one half type -> [B, S, H*d] in it; none of them is written."""
    return head_by_head(lambda q, k, v: _head(q, k, v, per_block_mean), q_BHSd, k_BHSd, v_BHSd)


def _head(q_Sd: Tensor, k_Sd: Tensor, v_Sd: Tensor, per_block_mean: bool) -> Tensor:
    rows, width = q_Sd.shape
    k_Sd = k_Sd - k_Sd.mean(dim=0, keepdim=True)  # rounded to the half type, as the kernels see it
    q_Nd = F.pad(q_Sd, (0, 0, 0, -rows % QUERY_BLOCK)).unflatten(0, (-1, QUERY_BLOCK))
    mean = q_Nd.mean(dim=1, keepdim=True)
    if not per_block_mean:
        mean = q_Sd.mean(dim=0).expand_as(mean)
    q4, k4 = round_fp4((q_Nd - mean).float()), round_fp4(k_Sd.float())
    v4_dS = round_fp4(F.pad(v_Sd.float().t(), (0, -rows % SCALED)))
    out = [
        _block(queries, query_mean.float(), k4, k_Sd.float(), v4_dS)
        for queries, query_mean in zip(q4 / math.sqrt(width), mean / math.sqrt(width), strict=True)
    ]
    return torch.cat(out)[:rows]


def _block(q4: Tensor, q_mean: Tensor, k4_Sd: Tensor, k_Sd: Tensor, v4_dS: Tensor) -> Tensor:
    scores = q4 @ k4_Sd.t() + q_mean @ k_Sd.t()
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    padded = F.pad(p * (_E2M1_MAX * _E4M3_MAX), (0, v4_dS.shape[1] - p.shape[1]))
    p4 = round_fp4(padded) / (_E2M1_MAX * _E4M3_MAX)
    return (p4 @ v4_dS.t()) / p.sum(-1, keepdim=True)


def round_fp4(x: Tensor) -> Tensor:
    """fp32 numbers rounded to e2m1 times the e4m3 scale of their 16; the last axis is a multiple
    of 16 long."""
    groups = x.unflatten(-1, (-1, SCALED))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (amax / _E2M1_MAX).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()
    ratio = torch.where(scale > 0, groups / scale.clamp(min=2.0**-9), 0.0)
    index = torch.bucketize(ratio.abs().contiguous(), torch.tensor(_LAST, device=x.device))
    magnitude = torch.tensor(_LEVELS, device=x.device)[index]
    return (magnitude * ratio.sign() * scale).flatten(-2)
