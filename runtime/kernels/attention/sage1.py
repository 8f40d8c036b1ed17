"""SageAttention 1.x, the Triton kernels of PyPI: INT8 QK, FP16 PV.

Its inner loop masks what it loads and not the logits: with S % 64 != 0 the last tile is filled with
keys of logit 0 that do not exist (performance.md 1.2). Such rows are refused.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.sage_package import DTYPES, check, installed, release, rows_first
from runtime.kernels.attention.sage_reference import SAGE1, sage_attention
from runtime.kernels.packages import function
from runtime.kernels.unavailable import Unavailable

NAME = "sage1"
ROWS_MULTIPLE = 64  # keys of a tile
HEAD_DIMS = (64, 96, 128)
LEAST_CAPABILITY = (8, 0)


def attend_with(module: ModuleType) -> Attend:
    """The callable over an imported sageattention 1.x."""

    sageattn = function(NAME, module, "sageattn")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        _check(q_BHSd)
        k_BSHd = k_BHSd.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        # It subtracts the mean from the K that it is given, in place: this one is ours to lose.
        out_BSHd: Tensor = sageattn(
            rows_first(q_BHSd),
            k_BSHd,
            rows_first(v_BHSd),
            tensor_layout="NHD",
            is_causal=False,
            sm_scale=None,
            smooth_k=True,
        )
        return out_BSHd.flatten(2)

    return attend


def _reference(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    _check(q_BHSd)
    return sage_attention(q_BHSd, k_BHSd, v_BHSd, SAGE1)


def _check(q_BHSd: Tensor) -> None:
    check(NAME, q_BHSd, HEAD_DIMS)
    check_rows(q_BHSd.shape[2])


def check_rows(rows: int) -> None:
    """Unavailable unless they fill whole tiles of keys."""
    if over := rows % ROWS_MULTIPLE:
        raise Unavailable(
            NAME,
            f"{rows} rows are no multiple of {ROWS_MULTIPLE}, and its kernel, which has no tail "
            f"mask, would attend to {ROWS_MULTIPLE - over} keys that do not exist; choose "
            f"attention sage2 or sdpa_cudnn",
        )


def refusal(version: str, capability: tuple[int, int]) -> str:
    """Why that version cannot run on that compute capability; "" if it can."""
    if release(version)[:1] != (1,):
        return (
            f"sageattention {version} is installed, 1.x is needed (pip install sageattention); "
            f"attention sage2 runs 2.2 and newer"
        )
    if capability < LEAST_CAPABILITY:
        got = ".".join(map(str, capability))
        return f"its kernels need compute capability 8.0 or newer, this GPU has {got}"
    return ""


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference of its arithmetic; CUDA: sageattention 1.x."""
    del options
    if device.type == "cpu":
        return _reference
    module, version = installed(NAME)
    if reason := refusal(version, torch.cuda.get_device_capability(device)):
        raise Unavailable(NAME, reason)
    return attend_with(module)


def route(device: torch.device, options: AttentionOptions) -> str:
    """Version and kernel for the run record."""
    del options
    if device.type == "cpu":
        return "CPU reference of sageattention 1.x: INT8 QK per block, FP16 PV, K smoothed"
    _, version = installed(NAME)
    return f"sageattention {version} qk_int8_per_block_pv_fp16 (Triton), K smoothed"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "sageattention 1.x, rows that are a multiple of 64, and a CUDA GPU of compute capability "
        "8.0 or newer; a CPU runs the reference of its arithmetic"
    ),
    package="sageattention",
    rows_multiple=ROWS_MULTIPLE,
    check_rows=check_rows,
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
)
