"""The steps of the video VAE's decoder as one kernel each, with the eager form's roundings.

As in triton.py, only the sums of squares are added in another order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from runtime.kernels.elementwise.vae_eager import VaeEager


class VaeTriton(VaeEager):
    """Replacing NaN is one kernel of torch's already."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def norm(self, norm: nn.RMSNorm, x_BNC: Tensor) -> Tensor:
        """As the eager form."""
        normed: Tensor = self._kernels.norm(x_BNC, norm.weight, norm.eps)
        return normed

    def rms_rope(self, q_BNHd: Tensor, k_BNHd: Tensor, table_1N1R22: Tensor, eps: float) -> None:
        """As the eager form, q and k at once."""
        self._kernels.rms_rope(q_BNHd, k_BNHd, table_1N1R22, eps)

    def swiglu(self, gate_up_BN2F: Tensor) -> Tensor:
        """As the eager form."""
        product: Tensor = self._kernels.swiglu(gate_up_BN2F)
        return product

    def scaled_add(self, x_BNC: Tensor, o_BNC: Tensor, scale_C: Tensor) -> None:
        """As the eager form, in place on x."""
        self._kernels.scaled_add(x_BNC, o_BNC, scale_C)
