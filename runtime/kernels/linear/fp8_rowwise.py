"""FP8 linears with a scale per row of activations and of weights: rows do not touch each other."""

from __future__ import annotations

import functools

import torch

from runtime.kernels.linear import fp8_dynamic
from runtime.kernels.linear.base import LinearBackend

CAPABILITY = (9, 0)  # torch has row-wise kernels for 8.9 too: not tried there
_SCALES = "a scale per row and per output feature"


def _reason(device: torch.device) -> str:
    return fp8_dynamic.reason(device, CAPABILITY)


BACKEND = LinearBackend(
    name="fp8_rowwise",
    formats=fp8_dynamic.FORMATS,
    build=functools.partial(fp8_dynamic.FP8DynamicLinear, rowwise=True),
    reason=_reason,
    route=lambda device: fp8_dynamic.route(device, _SCALES),
    requirement=(
        "a CUDA GPU of compute capability 9.0 or newer with Triton; a CPU runs its reference"
    ),
    narrows=True,
    whole_inputs=True,
)
