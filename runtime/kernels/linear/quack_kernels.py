"""QuACK's GEMM, plain and ending in SwiGLU; needs `quack-kernels`, which compiles with CuTe.

M rows, K input features, N output features, F hidden of the MLP (N = 2 F).
"""

from __future__ import annotations

import functools

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32
from quack.epilogue import gemm_epilogue, unpack
from quack.gemm_config import GemmConfig
from torch import Tensor

from runtime.kernels.linear.quack import ROWS, WIDTHS, WIDTHS_OF_PAIRS, width


@gemm_epilogue()
def _plain(acc):
    return {"D": acc}


def _rounded(x):
    return x.to(BFloat16).to(Float32)


@gemm_epilogue(outputs=("h",), mode="acc_pair")
def _gated(acc):
    """Every rounding of `F.silu(gate) * up` in bf16; `h` rounds the product."""
    gate, up = map(_rounded, unpack(acc))
    silu = gate * cute.arch.rcp_approx(1.0 + cute.math.exp(-gate, fastmath=True))
    return {"h": _rounded(silu) * up}


def product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T: bf16 [M, N], accumulated in fp32."""
    y_MN = x_MK.new_empty(len(x_MK), len(weight_NK))
    config = _tile(*y_MN.shape, WIDTHS, y_MN.device)
    _plain(x_MK, weight_NK.t(), out={"D": y_MN}, config=config, tuned=False)
    return y_MN


def swiglu(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """bf16 [M, F]: silu of the first half of x W^T, rounded, times the second."""
    h_MF = x_MK.new_empty(len(x_MK), len(weight_NK) // 2)
    _gated(
        x_MK,
        weight_NK.t(),
        out={"h": h_MF},
        store_d=False,
        config=_tile(len(x_MK), len(weight_NK), WIDTHS_OF_PAIRS, h_MF.device),
        tuned=False,
        concat_layout=("B",),  # W is [gate; up], not gate and up in turns
    )
    return h_MF


@functools.cache
def _tile(rows: int, features: int, widths: tuple[int, ...], device: torch.device) -> GemmConfig:
    """One object for equal arguments: the package keeps its launches by the identity of it."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return GemmConfig(
        tile_m=ROWS,
        tile_n=width(rows, features, processors, widths),
        pingpong=False,
        is_dynamic_persistent=False,
        cluster_m=1,
        cluster_n=2,  # two tiles of the same rows, which are read for both
        max_swizzle_size=8,
        device_capacity=9,
    )
