"""FP8 linears with one scale for all activations and one for the weight.

The activations' amax is over all rows: a run that shares rows among GPUs has to share it.
"""

from __future__ import annotations

import functools

import torch

from runtime.kernels.linear import fp8_dynamic
from runtime.kernels.linear.base import LinearBackend

CAPABILITY = (8, 9)
_SCALES = "one scale per tensor"


def _reason(device: torch.device) -> str:
    return fp8_dynamic.reason(device, CAPABILITY)


BACKEND = LinearBackend(
    name="fp8_tensorwise",
    formats=fp8_dynamic.FORMATS,
    build=functools.partial(fp8_dynamic.FP8DynamicLinear, rowwise=False),
    reason=_reason,
    route=lambda device: fp8_dynamic.route(device, _SCALES),
    requirement=(
        "a CUDA GPU of compute capability 8.9 or newer with Triton; a CPU runs its reference"
    ),
    narrows=True,
    scales_all_rows=True,
    whole_inputs=True,  # and its weight is rounded by the largest of all of it
)
