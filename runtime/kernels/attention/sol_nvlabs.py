"""Sol attention by its authors (package sol-attn of NVlabs/Sana): bf16, exact threshold.

A source build that no registry has. Unvalidated: written against its documented API and tested
with a stand-in module, never run here. Rows and sinks as in sol.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.sage_package import check, rows_first
from runtime.kernels.attention.sol import HEAD_DIMS, reference, settings
from runtime.kernels.packages import capabilities, function, installed, need_cuda

NAME, DISTRIBUTION = "sol_nvlabs", "sol-attn"
DTYPES = (torch.bfloat16,)
CAPABILITIES = ((8, 9), (9, 0), (10, 0), (12, 0))


def sink_tokens(rows: int, options: AttentionOptions) -> int:
    """How many of the first rows are exact: those of conditioning, or all where nothing else is."""
    conditioning = options.rows.conditioning
    if not conditioning:
        return rows
    return conditioning if options.sol_sinks == "conditioning" else 0


def attend_with(module: ModuleType, options: AttentionOptions) -> Attend:
    """The callable over an imported sol_attn."""

    sol_attn = function(NAME, module, "sol_attn")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, HEAD_DIMS)
        out_BSHd: Tensor = sol_attn(
            rows_first(q_BHSd),
            rows_first(k_BHSd),
            rows_first(v_BHSd),
            tau=options.sol_tau,
            thresh_type="exact",
            sink_start=0,
            sink_tokens=sink_tokens(q_BHSd.shape[2], options),
        )
        return out_BSHd.flatten(2)

    return attend


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference; CUDA: sol-attn."""
    if device.type == "cpu":
        return reference(options, NAME)
    need_cuda(NAME, device, CAPABILITIES)
    os.environ["SOL_ATTN_STRICT"] = "1"  # its own switch: an error where it would fall back
    return attend_with(installed(NAME, DISTRIBUTION, "sol_attn")[0], options)


def route(device: torch.device, options: AttentionOptions) -> str:
    """Variant, version, threshold and sinks for the run record."""
    if device.type == "cpu":
        return f"CPU reference of Sol attention in fp32, {settings(options)}"
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{DISTRIBUTION} {version} sol_attn bf16, exact threshold, {settings(options)}"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "sol-attn of NVlabs/Sana (a source build) and a CUDA GPU of compute capability "
        f"{capabilities(CAPABILITIES)}; a CPU runs the reference"
    ),
    package=DISTRIBUTION,
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
)
