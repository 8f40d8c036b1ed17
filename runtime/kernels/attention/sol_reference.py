"""Sol attention in PyTorch (arXiv 2607.24027): few key blocks exact, one summary for each other.

For CPUs and tests. A block of 64 queries scores every key block by the mean of its keys. Blocks
that score more than tau sigmas, the neighbours, and the sinks are attended to key by key; another
block enters the softmax once, with its mean key, its length and the sum of its values. The choice
is the published one and the arithmetic fp32 (comfy-kitchen's kernel takes INT8, NVlabs' bf16).
H heads, S rows, N blocks, d width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention.heads import head_by_head

BLOCK = 64
_LEAST_VARIANCE = 1e-6


def sol_attention(
    q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, *, tau: float, sink_blocks: int
) -> Tensor:
    """q, k, v [B, H, S, d] of one type -> [B, S, H*d] in it; none of them is written.

    The first `sink_blocks` blocks are exact for all queries, and their queries see all keys.
    """
    return head_by_head(
        lambda q, k, v: _head(q.float(), k.float(), v.float(), tau, sink_blocks),
        q_BHSd,
        k_BHSd,
        v_BHSd,
    )


def _head(q_Sd: Tensor, k_Sd: Tensor, v_Sd: Tensor, tau: float, sinks: int) -> Tensor:
    rows, width = q_Sd.shape
    q_Sd = q_Sd * (math.log2(math.e) / math.sqrt(width))
    length_N = _lengths(rows, q_Sd.device)
    q_Nd = _block_sums(q_Sd) / length_N[:, None]
    mean_Nd = _block_sums(k_Sd) / length_N[:, None]
    centre_d = mean_Nd.mean(0)  # softmax does not see it; the threshold does
    k_Sd, mean_Nd = k_Sd - centre_d, mean_Nd - centre_d
    sum_Nd = _block_sums(v_Sd)
    score_NN = q_Nd @ mean_Nd.t()
    exact_NN = exact_blocks(score_NN, q_Nd, mean_Nd, tau, sinks)
    out = []
    for n, queries in enumerate(q_Sd.split(BLOCK)):
        exact_S = exact_NN[n].repeat_interleave(BLOCK)[:rows]
        left = ~exact_NN[n]
        keys = queries @ k_Sd[exact_S].t()
        blocks = score_NN[n, left].expand(len(queries), -1)  # one score for the whole query block
        top = torch.cat([keys, blocks], dim=-1).amax(-1, keepdim=True)
        p, p_blocks = torch.exp2(keys - top), torch.exp2(blocks - top)
        total = p.sum(-1, keepdim=True) + p_blocks @ length_N[left, None]
        out.append((p @ v_Sd[exact_S] + p_blocks @ sum_Nd[left]) / total)
    return torch.cat(out)


def exact_blocks(score_NN: Tensor, q_Nd: Tensor, mean_Nd: Tensor, tau: float, sinks: int) -> Tensor:
    """Which key blocks [N] each query block [N] attends to key by key, from block scores."""
    sigma_N = (q_Nd.square() @ mean_Nd.square().mean(0) + _LEAST_VARIANCE).sqrt()
    exact = score_NN > tau * sigma_N[:, None]
    index = torch.arange(len(q_Nd), device=q_Nd.device)
    exact |= (index[:, None] - index).abs() <= 1
    exact[:sinks] = True
    exact[:, :sinks] = True
    return exact


def _lengths(rows: int, device: torch.device) -> Tensor:
    starts = torch.arange(0, rows, BLOCK, device=device)
    return (rows - starts).clamp(max=BLOCK).float()


def _block_sums(x_Sd: Tensor) -> Tensor:
    padded = F.pad(x_Sd, (0, 0, 0, -x_Sd.shape[0] % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).sum(1)
