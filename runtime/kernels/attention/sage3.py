"""SageAttention 3 (package sageattn3): all products in FP4; experimental, Blackwell only.

A source build that no registry has. Unvalidated: written against its documented API and tested
with a stand-in module, never run here.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.nvfp4_reference import QUERY_BLOCK, nvfp4_attention
from runtime.kernels.attention.sage_package import check
from runtime.kernels.packages import (
    capabilities,
    function,
    installed,
    need_correction_offsets,
    need_cuda,
)

NAME, DISTRIBUTION = "sage3", "sageattn3"
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITIES = ((10, 0), (12, 0), (12, 1))


def attend_with(module: ModuleType, *, per_block_mean: bool = True) -> Attend:
    """The callable over an imported sageattn3; the mean of Q is per block of rows, or of all."""
    sageattn3 = function(NAME, module, "sageattn3_blackwell")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        _check(q_BHSd)
        k_BHSd = k_BHSd.clone(memory_format=torch.contiguous_format)
        # It subtracts the mean from the K that it is given, in place: this one is ours to lose.
        out_BHSd: Tensor = sageattn3(
            q_BHSd, k_BHSd, v_BHSd, is_causal=False, per_block_mean=per_block_mean
        )
        return out_BHSd.transpose(1, 2).flatten(2)

    return attend


def _reference(per_block_mean: bool) -> Attend:
    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        _check(q_BHSd)
        return nvfp4_attention(q_BHSd, k_BHSd, v_BHSd, per_block_mean=per_block_mean)

    return attend


def _check(q_BHSd: Tensor) -> None:
    check(NAME, q_BHSd, HEAD_DIMS)
    need_correction_offsets(NAME, q_BHSd, QUERY_BLOCK)


def load_mode(device: torch.device, *, per_block_mean: bool) -> Attend:
    """CPU: the reference of its arithmetic; CUDA: sageattn3."""
    if device.type == "cpu":
        return _reference(per_block_mean)
    need_cuda(NAME, device, CAPABILITIES)
    module, _ = installed(NAME, DISTRIBUTION, "sageattn3")
    return attend_with(module, per_block_mean=per_block_mean)


def route_mode(device: torch.device, *, per_block_mean: bool) -> str:
    """Version and kernel for the run record."""
    mean = "mean per block of queries" if per_block_mean else "one mean of all queries"
    if device.type == "cpu":
        return f"CPU reference of SageAttention 3: FP4, {mean}"
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{DISTRIBUTION} {version} sageattn3_blackwell, {mean}"


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """The package's default: a mean per block."""
    del options
    return load_mode(device, per_block_mean=True)


def route(device: torch.device, options: AttentionOptions) -> str:
    """Version and kernel for the run record."""
    del options
    return route_mode(device, per_block_mean=True)


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "sageattn3 (a source build) and a CUDA GPU of compute capability "
        f"{capabilities(CAPABILITIES)}; a CPU runs the reference of its arithmetic"
    ),
    package=DISTRIBUTION,
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
    strided_v=True,
)
