"""KJ's Sage modes as KJNodes names them: which SageAttention function each calls, and with what.

Plan field `kj_mode` chooses. auto is `sageattn`, bit for bit what sage2 runs; the other modes name
one kernel whatever the GPU prefers (performance.md 1.10). The sageattn3 modes are sage3's.
Unvalidated: written against the documented functions, tested with a stand-in module.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from runtime.kernels.attention import sage2, sage3
from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.attention.sage_package import DTYPES, check, rows_first
from runtime.kernels.attention.sage_reference import (
    FP8_FP16,
    FP8_FP32,
    FP8_SM90,
    FP16_CUDA,
    FP16_TRITON,
    SageMaths,
    sage_attention,
)
from runtime.kernels.unavailable import Unavailable

NAME = "kj"
FP4_MODES = {"sageattn3": False, "sageattn3_per_block_mean": True}  # mode -> per_block_mean

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A function of the package with the arguments that a mode fixes, and where it runs."""

    function: str
    arguments: Mapping[str, str]
    capabilities: tuple[Capability, ...]
    maths: SageMaths


_AMPERE_TO_HOPPER = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))  # on 12.x both abort
FORMS: Mapping[str, tuple[Form, ...]] = {
    "fp16_cuda": (
        Form(
            function="sageattn_qk_int8_pv_fp16_cuda",
            arguments={"pv_accum_dtype": "fp32"},
            capabilities=_AMPERE_TO_HOPPER,
            maths=FP16_CUDA,
        ),
    ),
    "fp16_triton": (
        Form(
            function="sageattn_qk_int8_pv_fp16_triton",
            arguments={},
            capabilities=_AMPERE_TO_HOPPER,
            maths=FP16_TRITON,
        ),
    ),
    "fp8_cuda": (
        Form(
            function="sageattn_qk_int8_pv_fp8_cuda",
            arguments={"pv_accum_dtype": "fp32+fp32"},
            capabilities=((8, 9), (12, 0), (12, 1)),
            maths=FP8_FP32,
        ),
        Form(
            function="sageattn_qk_int8_pv_fp8_cuda_sm90",
            arguments={"pv_accum_dtype": "fp32+fp32"},
            capabilities=((9, 0),),
            maths=FP8_SM90,
        ),
    ),
    "fp8_cuda++": (
        Form(
            function="sageattn_qk_int8_pv_fp8_cuda",
            arguments={"pv_accum_dtype": "fp32+fp16"},
            capabilities=((8, 9), (12, 0), (12, 1)),
            maths=FP8_FP16,
        ),
    ),
}


def form_of(mode: str, capability: Capability) -> Form:
    """The function that a mode of FORMS calls on that GPU; Unavailable where it must not run."""
    for form in FORMS[mode]:
        if capability in form.capabilities:
            return form
    known = ", ".join(f"{a}.{b}" for form in FORMS[mode] for a, b in form.capabilities)
    got = ".".join(map(str, capability))
    raise Unavailable(
        NAME, f"kj_mode {mode} runs on compute capability {known}, this GPU has {got}; choose auto"
    )


def attend_with(module: ModuleType, form: Form) -> Attend:
    """The callable over an imported sageattention; K smoothing stays on, as 2.x has it."""
    function = getattr(module, form.function, None)
    if function is None:
        raise Unavailable(
            NAME, f"this build of sageattention has no {form.function}; choose kj_mode auto"
        )

    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, sage2.HEAD_DIMS)
        out_BSHd: Tensor = function(
            rows_first(q_BHSd),
            rows_first(k_BHSd),
            rows_first(v_BHSd),
            tensor_layout="NHD",
            is_causal=False,
            sm_scale=None,
            **form.arguments,
        )
        return out_BSHd.flatten(2)

    return attend


def _reference(form: Form) -> Attend:
    def attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
        check(NAME, q_BHSd, sage2.HEAD_DIMS)
        return sage_attention(q_BHSd, k_BHSd, v_BHSd, form.maths)

    return attend


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: the reference of the mode's arithmetic; CUDA: its function of sageattention >= 2.2."""
    mode = options.kj_mode
    if mode in FP4_MODES:
        return sage3.load_mode(device, per_block_mean=FP4_MODES[mode])
    if device.type == "cpu":
        return sage2.reference if mode == "auto" else _reference(FORMS[mode][0])
    if mode == "auto":
        return sage2.attend_with(sage2.module_for(NAME, device))
    form = form_of(mode, torch.cuda.get_device_capability(device))
    return attend_with(sage2.module_for(NAME, device), form)


def route(device: torch.device, options: AttentionOptions) -> str:
    """The mode and what it resolved to, for the run record."""
    mode = options.kj_mode
    if mode in FP4_MODES:
        return f"kj {mode}: {sage3.route_mode(device, per_block_mean=FP4_MODES[mode])}"
    if mode == "auto":
        return f"kj auto: {sage2.route(device, options)}"
    if device.type == "cpu":
        return f"kj {mode}: CPU reference of {_said(FORMS[mode][0])}"
    form = form_of(mode, torch.cuda.get_device_capability(device))
    return f"kj {mode}: sageattention {importlib.metadata.version('sageattention')} {_said(form)}"


def _said(form: Form) -> str:
    return " ".join([form.function.removeprefix("sageattn_"), *form.arguments.values()])


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=(
        "sageattention 2.2 or newer (a source build) and a CUDA GPU that the kj_mode has a kernel "
        "for; a CPU runs the reference of its arithmetic"
    ),
    package="sageattention",
    head_dims=sage2.HEAD_DIMS,
    dtypes=DTYPES,
    strided_v=True,
)
