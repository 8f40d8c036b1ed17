"""What CPU references of attention share: the arithmetic of one head, for every head and tile.

B tiles of the video VAE (the denoiser has one sequence), H heads, S rows, d width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def head_by_head(
    head: Callable[[Tensor, Tensor, Tensor], Tensor],
    q_BHSd: Tensor,
    k_BHSd: Tensor,
    v_BHSd: Tensor,
) -> Tensor:
    """[B, S, H*d] in the operands' type, of head(q, k, v), each [S, d] -> [S, d]."""
    tiles = [
        torch.stack([head(*operands) for operands in zip(q, k, v, strict=True)], dim=1)
        for q, k, v in zip(q_BHSd, k_BHSd, v_BHSd, strict=True)
    ]
    return torch.stack(tiles).to(q_BHSd.dtype).flatten(2)
