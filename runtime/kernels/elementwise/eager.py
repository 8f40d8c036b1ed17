"""PyTorch operation by operation: the rounding order of contract 1.13 to 1.15, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.kernels.elementwise.base import ElementwiseBackend, Span
from runtime.kernels.elementwise.vae_eager import VaeEager


class Eager:
    """Operand order, in-place updates and views are part of the model: parity before tidying."""

    def norm_modulate(
        self,
        norm: nn.RMSNorm,
        x_SD: Tensor,
        shift_TD: Tensor,
        scale_TD: Tensor,
        spans: Sequence[Span],
    ) -> Tensor:
        """Two roundings after the norm's: y *= 1 + scale, then y += shift."""
        y_SD: Tensor = norm(x_SD)  # called as a module: parity taps it
        for start, stop, row in spans:
            part = y_SD[start:stop]
            part.mul_(1 + scale_TD[row].to(y_SD.dtype)).add_(shift_TD[row].to(y_SD.dtype))
        return y_SD

    def gated_add(
        self, x_SD: Tensor, o_SD: Tensor, gate_TD: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """One rounding: addcmul in place on x."""
        for start, stop, row in spans:
            x_SD[start:stop].addcmul_(o_SD[start:stop], gate_TD[row].to(x_SD.dtype))
        return x_SD

    def gated_add_norm(
        self,
        x_SD: Tensor,
        o_SD: Tensor,
        gate_TD: Tensor,
        norm: nn.RMSNorm,
        shift_TD: Tensor,
        scale_TD: Tensor,
        spans: Sequence[Span],
    ) -> Tensor:
        """The one, then the other."""
        x_SD = self.gated_add(x_SD, o_SD, gate_TD, spans)
        return self.norm_modulate(norm, x_SD, shift_TD, scale_TD, spans)

    def swiglu(self, gate_up_S2F: Tensor) -> Tensor:
        """silu is rounded before the product."""
        gate, up = gate_up_S2F.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rms_rope(
        self,
        q_SHd: Tensor,
        k_SHd: Tensor,
        table_1S1R22: Tensor,
        q_weight_d: Tensor,
        k_weight_d: Tensor,
        eps: float,
    ) -> None:
        """Every operation rounded (1.14)."""
        for x_SHd, weight_d in ((q_SHd, q_weight_d), (k_SHd, k_weight_d)):
            x_SHd.copy_(_rms_rotate(x_SHd, table_1S1R22[0], weight_d, eps))

    def copy(self, into: Tensor, source: Tensor) -> None:
        """torch's."""
        into.copy_(source)

    def kept(self) -> tuple[Tensor, ...]:
        """Nothing."""
        return ()


def _rms_rotate(x_SHd: Tensor, table_S1R22: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    y_SHd = F.rms_norm(x_SHd, (x_SHd.shape[-1],), weight_d, eps)
    pairs = table_S1R22.shape[2]
    low, high = y_SHd[..., :pairs], y_SHd[..., pairs : 2 * pairs]
    cos, minus_sin = table_S1R22[..., 0, 0], table_S1R22[..., 0, 1]
    sin, cos_again = table_S1R22[..., 1, 0], table_S1R22[..., 1, 1]
    rotated_low = cos * low + minus_sin * high
    rotated_high = sin * low + cos_again * high
    return torch.cat([rotated_low, rotated_high, y_SHd[..., 2 * pairs :]], dim=-1)


BACKEND = ElementwiseBackend(
    name="eager",
    load=lambda device: Eager(),
    load_vae=lambda device: VaeEager(),
    route=lambda device: f"torch {torch.__version__}",
)
