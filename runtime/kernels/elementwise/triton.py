"""One kernel per step: every value is read and written once, with the eager form's roundings.

The result differs from the eager form's only where a sum of squares, added in another order, lands
on the neighbouring fp32 number: a few bf16 values in a million (docs/experiments.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.kernels.elementwise.base import ElementwiseBackend, Span
from runtime.kernels.elementwise.vae_triton import VaeTriton
from runtime.kernels.unavailable import Unavailable


class Triton:
    """The row of the table that each packed row uses is laid out once per set of spans."""

    def __init__(
        self, kernels: Any, rope_kernels: Any, copy_kernels: Any, device: torch.device
    ) -> None:
        self._kernels, self._rope_kernels = kernels, rope_kernels
        self._copy_kernels = copy_kernels
        self._device = device
        self._spans: tuple[Span, ...] = ()
        self._rows_S = torch.empty(0, dtype=torch.int32, device=device)

    def norm_modulate(
        self,
        norm: nn.RMSNorm,
        x_SD: Tensor,
        shift_TD: Tensor,
        scale_TD: Tensor,
        spans: Sequence[Span],
    ) -> Tensor:
        """As the eager form."""
        rows_S = self.rows(spans)
        result: Tensor = self._kernels.norm_modulate(
            x_SD, norm.weight, norm.eps, shift_TD, scale_TD, rows_S
        )
        return result

    def gated_add(
        self, x_SD: Tensor, o_SD: Tensor, gate_TD: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """As the eager form, in place on x."""
        self._kernels.gated_add(x_SD, o_SD, gate_TD, self.rows(spans))
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
        """As the eager form: x is read and written once, and its norm taken meanwhile."""
        result: Tensor = self._kernels.gated_add_norm(
            x_SD, o_SD, gate_TD, norm.weight, norm.eps, shift_TD, scale_TD, self.rows(spans)
        )
        return result

    def swiglu(self, gate_up_S2F: Tensor) -> Tensor:
        """As the eager form."""
        result: Tensor = self._kernels.swiglu(gate_up_S2F)
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
        """As the eager form, q and k at once."""
        self._rope_kernels.rms_rope(q_SHd, k_SHd, table_1S1R22, q_weight_d, k_weight_d, eps)

    def copy(self, into: Tensor, source: Tensor) -> None:
        """16 bytes at a time; ValueError for strides without contiguous runs."""
        self._copy_kernels.copy(into, source)

    def kept(self) -> tuple[Tensor, ...]:
        """The rows of the last spans."""
        return (self._rows_S,)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        """Each packed row's table row, int32 [S]."""
        key = tuple(spans)
        if key != self._spans:
            rows_S = torch.empty(key[-1][1], dtype=torch.int32)
            for start, stop, row in key:
                rows_S[start:stop] = row
            self._spans, self._rows_S = key, rows_S.to(self._device)
        return self._rows_S


def _load(device: torch.device) -> Triton:
    return Triton(
        _kernels("triton_kernels", device),
        _kernels("triton_rope_kernels", device),
        _kernels("triton_copy_kernels", device),
        device,
    )


def _load_vae(device: torch.device) -> VaeTriton:
    return VaeTriton(_kernels("vae_triton_kernels", device))


def _kernels(file: str, device: torch.device) -> Any:
    if device.type != "cuda":
        raise Unavailable("triton", f"its kernels need a CUDA device, got {device}")
    try:
        return importlib.import_module(f"runtime.kernels.elementwise.{file}")
    except ImportError as error:
        raise Unavailable("triton", f"Triton cannot be imported ({error})") from error


def _route(device: torch.device) -> str:
    version = importlib.import_module("triton").__version__
    return f"triton {version}, torch {torch.__version__}"


BACKEND = ElementwiseBackend(
    name="triton",
    load=_load,
    load_vae=_load_vae,
    route=_route,
    requirement="a CUDA GPU and Triton, which comes with PyTorch for CUDA",
    package="triton",
)
