"""Sol attention by comfy-kitchen: few key blocks exact in INT8, a summary for each other one.

The rows of text and references stay exact (the plan's sol_sinks). An evaluation without target
rows, the text refiner, is exact throughout. Other Sol kernels choose other blocks: see sol_nvlabs.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.sage_package import check, rows_first
from runtime.kernels.attention.sol_reference import BLOCK, sol_attention
from runtime.kernels.packages import function, installed, release
from runtime.kernels.unavailable import Unavailable

NAME, DISTRIBUTION = "sol", "comfy-kitchen"
LEAST_VERSION = (0, 2, 40)
HEAD_DIMS = (128,)
DTYPES = (torch.bfloat16, torch.float16)


def sink_blocks(rows: int, options: AttentionOptions) -> int:
    """How many of the first blocks are exact: those with conditioning rows, or all of them."""
    conditioning = options.rows.conditioning
    if not conditioning:
        return -(-rows // BLOCK)
    return -(-conditioning // BLOCK) if options.sol_sinks == "conditioning" else 0


def attend_with(module: ModuleType, options: AttentionOptions) -> Attend:
    """The callable over an imported comfy_kitchen."""

    sol_attn = function(NAME, module, "sol_attn")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, HEAD_DIMS)
        sinks = [0, sink_blocks(q_BHSd.shape[2], options)]
        with module.use_backend("cuda"):  # else its registry may hand over to the eager one
            out_BSHd: Tensor = sol_attn(
                rows_first(q_BHSd),
                rows_first(k_BHSd),
                rows_first(v_BHSd),
                tau=options.sol_tau,
                sink_blocks=sinks,
                sink_q=sinks,
            )
        return out_BSHd.flatten(2)

    return attend


def reference(options: AttentionOptions, name: str = NAME) -> Attend:
    """The choice of blocks as published, the arithmetic in fp32, on a CPU."""

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(name, q_BHSd, HEAD_DIMS)
        sinks = sink_blocks(q_BHSd.shape[2], options)
        return sol_attention(q_BHSd, k_BHSd, v_BHSd, tau=options.sol_tau, sink_blocks=sinks)

    return attend


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference; CUDA: comfy-kitchen 0.2.40's compiled kernel (8.0 or newer)."""
    if device.type == "cpu":
        return reference(options)
    if device.type != "cuda":
        raise Unavailable(NAME, f"it needs a CUDA device or the CPU, got {device}")
    module, version = installed(NAME, DISTRIBUTION, "comfy_kitchen")
    if release(version) < LEAST_VERSION:
        raise Unavailable(NAME, f"comfy-kitchen {version} is installed, 0.2.40 or newer is needed")
    if not function(NAME, module, "sol_attn_is_available")(device):
        raise Unavailable(
            NAME,
            f"the compiled sol_attn of comfy-kitchen {version} does not run on this GPU and driver "
            f"(compute capability 8.0 and CUDA 13 are needed)",
        )
    return attend_with(module, options)


def settings(options: AttentionOptions) -> str:
    """Threshold and sinks, as every result with Sol has to name them."""
    return f"tau {options.sol_tau:g}, sinks {options.sol_sinks}"


def route(device: torch.device, options: AttentionOptions) -> str:
    """Variant, version, threshold and sinks for the run record."""
    if device.type == "cpu":
        return f"CPU reference of Sol attention in fp32, {settings(options)}"
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{DISTRIBUTION} {version} sol_attn INT8 (pooled tail), {settings(options)}"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "comfy-kitchen 0.2.40 or newer and a CUDA GPU of compute capability 8.0 or newer; a CPU "
        "runs the reference"
    ),
    package=DISTRIBUTION,
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
)
