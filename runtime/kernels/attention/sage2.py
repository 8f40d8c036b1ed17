"""SageAttention 2.2 or newer: INT8 QK, FP8 or FP16 PV; the correctness baseline on Blackwell.

A source build (PyPI carries 1.x only). Unvalidated: written against its documented API and tested
with a stand-in module, never run here.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.sage_package import DTYPES, check, installed, release, rows_first
from runtime.kernels.attention.sage_reference import FP8_SM90, sage_attention
from runtime.kernels.packages import function
from runtime.kernels.unavailable import Unavailable

NAME = "sage2"
LEAST_VERSION = (2, 2)
HEAD_DIMS = (64, 128)
# compute capability -> the kernel `sageattn` picks there; others raise inside the package. Each
# smooths K into a tensor of its own and masks the tail; sm90 pads a copy of V to 128 rows.
ROUTES = {
    (8, 0): "qk_int8_pv_fp16_cuda",
    (8, 6): "qk_int8_pv_fp16_triton",
    (8, 7): "qk_int8_pv_fp16_cuda",
    (8, 9): "qk_int8_pv_fp8_cuda fp32+fp16",
    (9, 0): "qk_int8_pv_fp8_cuda_sm90 fp32+fp32",
    (12, 0): "qk_int8_pv_fp8_cuda per_warp fp32+fp16",
    (12, 1): "qk_int8_pv_fp8_cuda per_warp fp32+fp16",
}
REFERENCE = "CPU reference of SageAttention 2.2 qk_int8_pv_fp8_cuda_sm90 fp32+fp32, K smoothed"


def attend_with(module: ModuleType) -> Attend:
    """The callable over an imported sageattention; K smoothing stays on, as 2.x has it."""

    sageattn = function(NAME, module, "sageattn")

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, HEAD_DIMS)
        out_BSHd: Tensor = sageattn(
            rows_first(q_BHSd),
            rows_first(k_BHSd),
            rows_first(v_BHSd),
            tensor_layout="NHD",
            is_causal=False,
            sm_scale=None,
        )
        return out_BSHd.flatten(2)

    return attend


def reference(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    """What the sm90 kernel computes, on a CPU."""
    check(NAME, q_BHSd, HEAD_DIMS)
    return sage_attention(q_BHSd, k_BHSd, v_BHSd, FP8_SM90)


def refusal(version: str, capability: tuple[int, int]) -> str:
    """Why that version cannot run on that compute capability; "" if it can."""
    if release(version) < LEAST_VERSION:
        return (
            f"sageattention {version} is installed, 2.2 or newer is needed (a source build; the "
            f"1.x kernel has no tail mask and reads keys that do not exist)"
        )
    if capability not in ROUTES:
        got = ".".join(map(str, capability))
        known = ", ".join(f"{major}.{minor}" for major, minor in ROUTES)
        return f"it has kernels for compute capability {known}, this GPU has {got}"
    return ""


def module_for(name: str, device: torch.device) -> ModuleType:
    """sageattention 2.2 or newer for the backend of that name; else Unavailable with the reason."""
    module, version = installed(name)
    if reason := refusal(version, torch.cuda.get_device_capability(device)):
        raise Unavailable(name, reason)
    return module


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference of its arithmetic; CUDA: sageattention >= 2.2 and kernels for the GPU."""
    del options
    return reference if device.type == "cpu" else attend_with(module_for(NAME, device))


def route(device: torch.device, options: AttentionOptions) -> str:
    """Version and resolved kernel for the run record: goldens do not transfer between kernels."""
    del options
    if device.type == "cpu":
        return REFERENCE
    version = importlib.metadata.version("sageattention")
    return f"sageattention {version} {ROUTES[torch.cuda.get_device_capability(device)]}"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "sageattention 2.2 or newer (a source build) and a CUDA GPU of compute capability "
        + ", ".join(f"{major}.{minor}" for major, minor in ROUTES)
        + "; a CPU runs the reference of its arithmetic"
    ),
    package="sageattention",
    head_dims=HEAD_DIMS,
    dtypes=DTYPES,
    strided_v=True,
)
