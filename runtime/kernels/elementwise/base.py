"""What a form of the elementwise steps offers; the eager form is the reference of the rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Copy = Callable[[Tensor, Tensor], object]  # into, source: of one shape and dtype, any strides
Span = tuple[int, int, int]  # rows [start, stop) use row `row` of an AdaLN table


class Elementwise(Protocol):
    """The steps between the products of a block (contract 1.13 to 1.15), compute dtype throughout.

    Tables are [T, D], fp32 or compute dtype; they are rounded to the compute dtype first.
    """

    def norm_modulate(
        self,
        norm: nn.RMSNorm,
        x_SD: Tensor,
        shift_TD: Tensor,
        scale_TD: Tensor,
        spans: Sequence[Span],
    ) -> Tensor:
        """`norm`, then times 1 + scale, then plus shift, each rounded; a new tensor."""

    def gated_add(
        self, x_SD: Tensor, o_SD: Tensor, gate_TD: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """x += o * gate in place with one rounding; returns x."""

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
        """`gated_add` in place on x, then `norm_modulate` of x, which is returned."""

    def swiglu(self, gate_up_S2F: Tensor) -> Tensor:
        """silu of the first half, rounded, times the second: [S, F]."""

    def rms_rope(
        self,
        q_SHd: Tensor,
        k_SHd: Tensor,
        table_1S1R22: Tensor,
        q_weight_d: Tensor,
        k_weight_d: Tensor,
        eps: float,
    ) -> None:
        """RMSNorm over the head, then rotation of its first 2R dims; in place, views of one buffer.

        The table holds [[cos, -sin], [sin, cos]] of R pairs, rounded to the compute dtype.
        """

    def copy(self, into: Tensor, source: Tensor) -> None:
        """into[...] = source, of the same shape and dtype, whatever the strides; no overlap."""

    def kept(self) -> tuple[Tensor, ...]:
        """Tensors kept between calls that the last ones read: a CUDA graph of them holds these."""


class VaeElementwise(Protocol):
    """The steps between the products of a block of the video VAE's decoder (contract 6.4).

    B tiles, N tokens, C hidden, F hidden of the MLP; fp16 or fp32 throughout.
    """

    def norm(self, norm: nn.RMSNorm, x_BNC: Tensor) -> Tensor:
        """`norm`, rounded once; a new tensor."""

    def rms_rope(self, q_BNHd: Tensor, k_BNHd: Tensor, table_1N1R22: Tensor, eps: float) -> None:
        """RMSNorm over the head without weight, then rotation of its first 2R dims; in place.

        q and k are views of one buffer; the table is that of `Elementwise.rms_rope`.
        """

    def nan_to_zero(self, x: Tensor) -> Tensor:
        """x with 0 for NaN; infinities stay. A new tensor."""

    def swiglu(self, gate_up_BN2F: Tensor) -> Tensor:
        """silu of the first half, rounded, times the second: [B, N, F]."""

    def scaled_add(self, x_BNC: Tensor, o_BNC: Tensor, scale_C: Tensor) -> None:
        """x += o * scale in place with one rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseBackend:
    """A form by name. The loads raise Unavailable where it cannot run; `route` says what runs."""

    name: str
    load: Callable[[torch.device], Elementwise]
    load_vae: Callable[[torch.device], VaeElementwise]
    route: Callable[[torch.device], str]
    requirement: str = "any device"
    package: str = "torch"
