"""FP4 attention as flashinfer ports SageAttention 3 to compute capability 12.x; experimental.

Its kernels are compiled by nvcc when the backend loads. Unvalidated: written against the wheel of
0.7.4 and tested with a stand-in module, never run here.
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
from runtime.kernels.unavailable import Unavailable

NAME, DISTRIBUTION = "sage3_flashinfer", "flashinfer-python"
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITIES = ((12, 0), (12, 1))


def attend_with(module: ModuleType) -> Attend:
    """The callable over an imported flashinfer.nvfp4_attention_sm120."""

    quantize = function(NAME, module, "nvfp4_attention_sm120_quantize_qkv")
    forward = function(NAME, module, "nvfp4_attention_sm120_fwd")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        _check(q_BHSd)
        rows = q_BHSd.shape[2]
        quantised = quantize(
            q_BHSd.contiguous(), k_BHSd.contiguous(), v_BHSd.contiguous(), per_block_mean=True
        )
        out_BHSd: Tensor = forward(
            *quantised,
            causal=False,
            per_block_mean=True,
            out_dtype=q_BHSd.dtype,
            return_lse=False,
            unpadded_k_len=rows,  # else the zeros that fill the last block are keys
        )
        return out_BHSd[:, :, :rows].transpose(1, 2).flatten(2)

    return attend


def _reference(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    _check(q_BHSd)
    return nvfp4_attention(q_BHSd, k_BHSd, v_BHSd, per_block_mean=True)


def _check(q_BHSd: Tensor) -> None:
    check(NAME, q_BHSd, HEAD_DIMS)
    need_correction_offsets(NAME, q_BHSd, QUERY_BLOCK)


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference of its arithmetic; CUDA: flashinfer, whose kernels are compiled here."""
    del options
    if device.type == "cpu":
        return _reference
    need_cuda(NAME, device, CAPABILITIES)
    module, version = installed(NAME, DISTRIBUTION, "flashinfer.nvfp4_attention_sm120")
    build = function(NAME, module, "get_nvfp4_attention_sm120_module")
    try:
        build()
    except Exception as error:  # a compiler that is missing or fails, in whatever words
        reason = f"the kernels of {DISTRIBUTION} {version} cannot be compiled ({error})"
        raise Unavailable(NAME, reason) from error
    return attend_with(module)


def route(device: torch.device, options: AttentionOptions) -> str:
    """Version and kernel for the run record."""
    del options
    if device.type == "cpu":
        return "CPU reference of SageAttention 3: FP4, mean per block of queries"
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{DISTRIBUTION} {version} nvfp4_attention_sm120, mean per block of queries"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "flashinfer-python with nvcc, and a CUDA GPU of compute capability "
        f"{capabilities(CAPABILITIES)}; a CPU runs the reference of its arithmetic"
    ),
    package=DISTRIBUTION,
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
    strided_v=True,
)
