"""The steps of the video VAE's decoder by PyTorch, operation by operation (contract 6.4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VaeEager:
    """Every operation rounds; what is written in place is part of the model."""

    def norm(self, norm: nn.RMSNorm, x_BNC: Tensor) -> Tensor:
        """The module itself."""
        normed: Tensor = norm(x_BNC)
        return normed

    def rms_rope(self, q_BNHd: Tensor, k_BNHd: Tensor, table_1N1R22: Tensor, eps: float) -> None:
        """Two products and a sum, each rounded."""
        for x_BNHd in (q_BNHd, k_BNHd):
            _norm_and_rotate_(x_BNHd, table_1N1R22, eps)

    def nan_to_zero(self, x: Tensor) -> Tensor:
        """A new tensor; infinities stay."""
        return torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def swiglu(self, gate_up_BN2F: Tensor) -> Tensor:
        """silu is rounded before the product."""
        gate, up = gate_up_BN2F.chunk(2, dim=-1)
        return F.silu(gate) * up

    def scaled_add(self, x_BNC: Tensor, o_BNC: Tensor, scale_C: Tensor) -> None:
        """addcmul in place: one rounding."""
        x_BNC.addcmul_(o_BNC, scale_C)


def _norm_and_rotate_(x_BNHd: Tensor, table: Tensor, eps: float) -> None:
    pairs = table.shape[3]
    normed = F.rms_norm(x_BNHd, x_BNHd.shape[-1:], eps=eps)
    a, b = normed[..., :pairs], normed[..., pairs : 2 * pairs]
    x_BNHd[..., :pairs] = table[..., 0, 0] * a + table[..., 0, 1] * b
    x_BNHd[..., pairs : 2 * pairs] = table[..., 1, 0] * a + table[..., 1, 1] * b
    x_BNHd[..., 2 * pairs :] = normed[..., 2 * pairs :]
