"""Triton's steps, ending in the FP8 rows that fp8_rowwise would make of their result, bit for bit.

The bf16 result is never written: a norm or a SwiGLU and the quantiser behind it are one kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from torch import Tensor, nn

from runtime.kernels.elementwise.base import Span
from runtime.kernels.elementwise.triton import Triton
from runtime.kernels.scaled import Scaled


class FP8Rows:
    """Around Triton's steps, for a block whose four linears all take FP8 rows."""

    def __init__(self, plain: Triton) -> None:
        self._plain = plain
        self._kernels = importlib.import_module("runtime.kernels.elementwise.fp8_rows_kernels")

    def norm_modulate(
        self,
        norm: nn.RMSNorm,
        x_SD: Tensor,
        shift_TD: Tensor,
        scale_TD: Tensor,
        spans: Sequence[Span],
    ) -> Scaled:
        """As Triton's, quantised row by row."""
        result: Scaled = self._kernels.norm_modulate(
            x_SD, norm.weight, norm.eps, shift_TD, scale_TD, self._plain.rows(spans)
        )
        return result

    def gated_add(
        self, x_SD: Tensor, o_SD: Tensor, gate_TD: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """Triton's, in place on x."""
        return self._plain.gated_add(x_SD, o_SD, gate_TD, spans)

    def gated_add_norm(
        self,
        x_SD: Tensor,
        o_SD: Tensor,
        gate_TD: Tensor,
        norm: nn.RMSNorm,
        shift_TD: Tensor,
        scale_TD: Tensor,
        spans: Sequence[Span],
    ) -> Scaled:
        """As Triton's, the norm quantised row by row."""
        result: Scaled = self._kernels.gated_add_norm(
            x_SD, o_SD, gate_TD, norm.weight, norm.eps, shift_TD, scale_TD, self._plain.rows(spans)
        )
        return result

    def swiglu(self, gate_up_S2F: Tensor) -> Scaled:
        """As Triton's, quantised row by row."""
        result: Scaled = self._kernels.swiglu(gate_up_S2F)
        return result

    def rms_rope(
        self,
        q_SHd: Tensor,
        k_SHd: Tensor,
        table_1S1R22: Tensor,
        q_weight_d: Tensor,
        k_weight_d: Tensor,
        eps: float,
    ) -> None:
        """Triton's, in place."""
        self._plain.rms_rope(q_SHd, k_SHd, table_1S1R22, q_weight_d, k_weight_d, eps)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Triton's."""
        self._plain.copy(into, source)

    def kept(self) -> tuple[Tensor, ...]:
        """Triton's."""
        return self._plain.kept()
