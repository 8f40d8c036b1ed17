"""FlashAttention 4 (flash-attn-4): exact, CuTe kernels compiled at their first call.

One kernel per head dim, dtype and GPU serves every number of rows; the first call takes seconds.
Unvalidated on Blackwell.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.sage_package import check, rows_first
from runtime.kernels.packages import function, installed
from runtime.kernels.unavailable import Unavailable

NAME, DISTRIBUTION = "fa4", "flash-attn-4"
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAJORS = (8, 9, 10, 11, 12)  # of compute capability; the package asserts the same


def attend_with(module: ModuleType) -> Attend:
    """The callable over an imported flash_attn.cute."""

    flash = function(NAME, module, "flash_attn_func")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, HEAD_DIMS)
        q_BSHd, k_BSHd, v_BSHd = rows_first(q_BHSd), rows_first(k_BHSd), rows_first(v_BHSd)
        out_BSHd, _ = flash(q_BSHd, k_BSHd, v_BSHd, causal=False)
        return out_BSHd.flatten(2)

    return attend


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """Needs a CUDA device of compute capability 8.0 or newer and flash-attn-4."""
    del options
    if device.type != "cuda":
        raise Unavailable(NAME, f"it needs a CUDA device, got {device}")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in MAJORS:
        raise Unavailable(
            NAME,
            f"it has kernels for compute capability 8.0 to 12.1, this GPU has {major}.{minor}",
        )
    module, _ = installed(NAME, DISTRIBUTION, "flash_attn.cute")
    return attend_with(module)


def route(device: torch.device, options: AttentionOptions) -> str:
    """Versions of the package and of its compiler, and the kernel's architecture."""
    del options
    major, minor = torch.cuda.get_device_capability(device)
    dsl = importlib.metadata.version("nvidia-cutlass-dsl")
    return (
        f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} forward sm{major}{minor} "
        f"(nvidia-cutlass-dsl {dsl})"
    )


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement="flash-attn-4 and a CUDA GPU of compute capability 8.0 or newer",
    package=DISTRIBUTION,
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
    strided_v=True,
)
