"""SageAttention 2.2 or newer: INT8 QK, FP8 or FP16 PV; the correctness baseline on Blackwell.

A source build (PyPI carries 1.x only). Unvalidated: written against its documented API and tested
with a stand-in module, never run here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend
from runtime.kernels.unavailable import Unavailable

NAME = "sage2"
LEAST_VERSION = (2, 2)
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
INT32_ELEMENTS = 2**31  # its kernels address q, k and v with 32-bit element offsets
# compute capability -> the kernel `sageattn` picks there; others raise inside the package
ROUTES = {
    (8, 0): "qk_int8_pv_fp16_cuda",
    (8, 6): "qk_int8_pv_fp16_triton",
    (8, 7): "qk_int8_pv_fp16_cuda",
    (8, 9): "qk_int8_pv_fp8_cuda fp32+fp16",
    (9, 0): "qk_int8_pv_fp8_cuda_sm90 fp32+fp32",
    (12, 0): "qk_int8_pv_fp8_cuda per_warp fp32+fp16",
    (12, 1): "qk_int8_pv_fp8_cuda per_warp fp32+fp16",
}


def attend_with(module: ModuleType) -> Attend:
    """The callable over an imported sageattention; K smoothing stays on, as 2.x has it."""

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        _check(q_BHSd)
        out_BHSd: Tensor = module.sageattn(
            q_BHSd, k_BHSd, v_BHSd, tensor_layout="HND", is_causal=False, sm_scale=None
        )
        return out_BHSd.transpose(1, 2).flatten(2)

    return attend


def _check(q_BHSd: Tensor) -> None:
    if q_BHSd.dtype not in DTYPES:
        raise Unavailable(NAME, f"it computes bf16 and fp16 only, got {q_BHSd.dtype}")
    _, heads, rows, dim = q_BHSd.shape
    if dim not in HEAD_DIMS:
        raise Unavailable(NAME, f"its kernels take head dims 64 and 128, got {dim}")
    if heads * rows * dim >= INT32_ELEMENTS:
        raise Unavailable(NAME, f"{rows} rows overflow its 32-bit offsets; shorten the clip")


def refusal(version: str, capability: tuple[int, int]) -> str:
    """Why that version cannot run on that compute capability; "" if it can."""
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit())
    if parts < LEAST_VERSION:
        return (
            f"sageattention {version} is installed, 2.2 or newer is needed (a source build; the "
            f"1.x kernel has no tail mask and reads keys that do not exist)"
        )
    if capability not in ROUTES:
        got = ".".join(map(str, capability))
        known = ", ".join(f"{major}.{minor}" for major, minor in ROUTES)
        return f"it has kernels for compute capability {known}, this GPU has {got}"
    return ""


def load(device: torch.device) -> Attend:
    """Needs a CUDA device it has kernels for, and sageattention >= 2.2."""
    if device.type != "cuda":
        raise Unavailable(NAME, f"it needs a CUDA device, got {device}")
    try:
        version = importlib.metadata.version("sageattention")
        module = importlib.import_module("sageattention")
    except ImportError as error:
        raise Unavailable(NAME, f"sageattention cannot be imported ({error})") from error
    if reason := refusal(version, torch.cuda.get_device_capability(device)):
        raise Unavailable(NAME, reason)
    return attend_with(module)


def route(device: torch.device) -> str:
    """Version and resolved kernel for the run record: goldens do not transfer between kernels."""
    version = importlib.metadata.version("sageattention")
    return f"sageattention {version} {ROUTES[torch.cuda.get_device_capability(device)]}"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "sageattention 2.2 or newer (a source build) and a CUDA GPU of compute capability "
        + ", ".join(f"{major}.{minor}" for major, minor in ROUTES)
    ),
    package="sageattention",
    dtypes=DTYPES,
)
