"""comfy-kitchen's int8_attention: all products in INT8 after a Hadamard rotation."""

from __future__ import annotations

import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.int8_reference import WIDTHS, int8_attention
from runtime.kernels.attention.sage_package import check, rows_first
from runtime.kernels.packages import function, installed
from runtime.kernels.unavailable import Unavailable

NAME, DISTRIBUTION = "ck_int8", "comfy-kitchen"
DTYPES = (torch.bfloat16, torch.float16)


def attend_with(module: ModuleType) -> Attend:
    """The callable over an imported comfy_kitchen."""

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, WIDTHS)
        q, k, v = (rows_first(x).transpose(1, 2) for x in (q_BHSd, k_BHSd, v_BHSd))
        out_BHSd: Tensor = module.int8_attention(q, k, v)
        return out_BHSd.transpose(1, 2).flatten(2)

    return attend


def _reference(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    check(NAME, q_BHSd, WIDTHS)
    return int8_attention(q_BHSd, k_BHSd, v_BHSd)


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference of its arithmetic; CUDA: the compiled kernel (7.5 or newer)."""
    del options
    if device.type == "cpu":
        return _reference
    if device.type != "cuda":
        raise Unavailable(NAME, f"it needs a CUDA device or the CPU, got {device}")
    module, version = installed(NAME, DISTRIBUTION, "comfy_kitchen")
    if not hasattr(module, "int8_attention"):
        raise Unavailable(NAME, f"comfy-kitchen {version} has no int8_attention; install 0.2.31")
    if not function(NAME, module, "int8_attention_is_available")(device):
        raise Unavailable(
            NAME,
            f"the compiled attention of comfy-kitchen {version} does not run on this GPU and "
            f"driver (compute capability 7.5 and CUDA 13 are needed)",
        )
    return attend_with(module)


def route(device: torch.device, options: AttentionOptions) -> str:
    """Version and kernel for the run record."""
    del options
    if device.type == "cpu":
        return "CPU reference of comfy-kitchen int8_attention: INT8, Hadamard rotation"
    version = importlib.metadata.version(DISTRIBUTION)
    return f"{DISTRIBUTION} {version} int8_attention, Hadamard rotation"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "comfy-kitchen 0.2.31 or newer and a CUDA GPU of compute capability 7.5 or newer; a CPU "
        "runs the reference of its arithmetic"
    ),
    package=DISTRIBUTION,
    head_dims=WIDTHS,
    dtypes=DTYPES,
)
