"""INT8 attention with a Hadamard rotation in PyTorch, as comfy-kitchen documents int8_attention.

For CPUs and tests. Rotating queries and keys alike leaves their products and spreads a channel that
carries much over all of them; then INT8 with a scale per 4 queries and per 16 or 32 keys, values in
INT8 with a scale per channel, probabilities in unsigned INT8. The compiled kernel's signs of the
rotation and its choice of the subtracted key are not published: here no signs, and the middle key.
B tiles, H heads, S rows, d width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention.heads import head_by_head

WIDTHS = (64, 128)
QUERIES_AT_ONCE = 1024  # bounds the score matrix
_SHORT, _LONG = 256, 1024  # keys: up to 256 rotated by fours; past 1024 scales cover 32 keys
_SMALLEST = 1e-8  # of a scale


def int8_attention(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    """q, k, v [B, H, S, d] of one type -> [B, S, H*d] in it; none of them is written."""
    return head_by_head(
        lambda q, k, v: _head(q.float(), k.float(), v.float()), q_BHSd, k_BHSd, v_BHSd
    )


def _head(q_Sd: Tensor, k_Sd: Tensor, v_Sd: Tensor) -> Tensor:
    rows, width = q_Sd.shape
    size = 4 if rows <= _SHORT else width
    q_Sd = rotated(q_Sd, size)
    k_Sd = rotated(_shifted(k_Sd), size)
    q8, q_scale = _grouped(q_Sd, block=32, groups=8, pair=1)
    k8, k_scale = _grouped(k_Sd, block=128 if rows > _LONG else 64, groups=4, pair=2)
    v_scale = (v_Sd.abs().amax(0) / 127).clamp(min=_SMALLEST)
    v8 = (v_Sd / v_scale).round()
    out = []
    for queries, scale in zip(
        q8.split(QUERIES_AT_ONCE), q_scale.split(QUERIES_AT_ONCE), strict=True
    ):
        scores = (queries @ k8.t()) * (scale * k_scale.t()) / math.sqrt(width)
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        p8 = (p * 255).round()
        out.append((p8 @ v8) * (v_scale / 255) / p.sum(-1, keepdim=True))
    return torch.cat(out)


def rotated(x: Tensor, size: int) -> Tensor:
    """Each run of `size` channels through the orthonormal Hadamard matrix of that size."""
    matrix = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]
        ) / math.sqrt(2)
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


def _shifted(k_Sd: Tensor) -> Tensor:
    """Without a representative key where that narrows the range: softmax does not see it."""
    shifted = k_Sd - k_Sd[k_Sd.shape[0] // 2]
    return shifted if shifted.abs().amax() < k_Sd.abs().amax() else k_Sd


def _grouped(x_Sd: Tensor, *, block: int, groups: int, pair: int) -> tuple[Tensor, Tensor]:
    """(whole numbers -127 to 127, scales [S, 1]): row i of a block belongs to group i // pair
    modulo `groups`, as the threads of a warp hold the rows."""
    rows = x_Sd.shape[0]
    amax_S = F.pad(x_Sd.abs().amax(-1), (0, -rows % block))
    shaped = amax_S.reshape(-1, block // (groups * pair), groups, pair)
    shared = shaped.amax(dim=(1, 3), keepdim=True).expand_as(shaped)
    scale_S1 = (shared.reshape(-1)[:rows, None] / 127).clamp(min=_SMALLEST)
    return (x_Sd / scale_S1).round(), scale_S1
