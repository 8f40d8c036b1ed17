"""FP8 products with activations scaled as they come: what fp8_rowwise and fp8_tensorwise share.

Axes: M rows, K input features, N output features. Codes are e4m3, scales fp32.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, PackedWeight
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.packed import AmaxLinear, ShareAmax, beside_weight, unshared
from runtime.kernels.scaled import AMAX_FLOOR, E4M3_MAX, Scaled
from runtime.kernels.unavailable import Unavailable

MULTIPLE = 16  # of K and N, for the tensor cores
FORMATS = (UNQUANTISED, "nvfp4", "float8_e4m3fn")
_KERNELS = "runtime.kernels.linear.triton_fp8"


class Quantise(Protocol):
    """What quantise_rows and quantise_tensor are, and Triton's kernels of the same names."""

    def __call__(self, x_MK: Tensor, share_amax: ShareAmax = unshared) -> Scaled:
        """Codes and scales."""


def quantise_rows(x_MK: Tensor, share_amax: ShareAmax = unshared) -> Scaled:
    """Each row by itself: codes = e4m3(x * (448 / amax)), scale = amax / 448, all in fp32.

    A row lies whole on a rank: there is nothing to share.
    """
    del share_amax
    return _quantise(x_MK, x_MK.abs().amax(dim=-1, keepdim=True))


def quantise_tensor(x_MK: Tensor, share_amax: ShareAmax = unshared) -> Scaled:
    """The same with one amax over all of x, of which other ranks may have more rows."""
    return _quantise(x_MK, share_amax(x_MK.abs().amax()))


def _quantise(x_MK: Tensor, amax: Tensor) -> Scaled:
    amax = amax.float().clamp(min=AMAX_FLOOR)
    most = amax.new_full((), E4M3_MAX)  # a tensor: torch divides by a number's reciprocal on CUDA
    codes_MK = (x_MK.float() * (most / amax)).to(torch.float8_e4m3fn)
    return Scaled(codes_MK, amax / most)


class FP8DynamicLinear(AmaxLinear):
    """y = round(round(acc * (scale_x * scale_w)) + b); on a GPU acc is torch's _scaled_mm, fp32.

    The bias comes after the rounded product for any number of rows: cuBLASLt has no row-wise kernel
    that adds it for few rows of some widths (1 and 17 rows, H200: CUBLAS_STATUS_NOT_SUPPORTED).

    The weight is quantised once, from fp32; stored e4m3 codes stay as they are with their scale. A
    stored input_scale is not used. On the CPU acc is exact: products of e4m3 codes are multiples of
    2^-18 below 2^18, which float64 adds up without rounding.
    """

    def __init__(self, packed: PackedWeight, *, rowwise: bool) -> None:
        on_gpu = packed.tensors["weight"].is_cuda
        if on_gpu and any(size % MULTIPLE for size in packed.shape):
            raise Unavailable(
                "fp8_rowwise" if rowwise else "fp8_tensorwise",
                f"layer {packed.layer} is {packed.shape[0]}x{packed.shape[1]}, and both must be "
                f"multiples of {MULTIPLE}",
            )
        quantise = quantiser(rowwise=rowwise, on_gpu=on_gpu)
        weight = _stored(packed) or quantise(dequantise(packed, torch.float32))
        scale = weight.scale
        if rowwise:  # as _scaled_mm takes it, one number per output feature
            scale = scale.reshape(1, -1).expand(1, packed.shape[0]).contiguous()
        tensors = {"weight": weight.codes, "weight_scale": scale, **beside_weight(packed)}
        super().__init__(replace(packed, tensors=tensors))
        self.quantise = quantise
        self.takes_rows = rowwise and self.pre_quant_scale is None  # quantised by the step before

    def forward(self, x: Tensor | Scaled) -> Tensor:
        """x [...,K] -> [...,N] in x's dtype; rows that are FP8 already -> [M,N] in bf16."""
        if isinstance(x, Scaled):
            return self.multiply(x, torch.bfloat16)
        x_MK = self.scaled_input(x).reshape(-1, self.in_features)
        scaled = self.quantise(x_MK, self.share_amax)
        return self.multiply(scaled, x.dtype).reshape(*x.shape[:-1], self.out_features)

    def multiply(self, scaled: Scaled, dtype: torch.dtype) -> Tensor:
        """Codes [M,K] -> [M,N] in `dtype`."""
        product = self._product if scaled.codes.is_cuda else self._reference
        y_MN = product(scaled, dtype)
        return y_MN if self.bias is None else y_MN.add_(self.bias.to(dtype))

    def _product(self, scaled: Scaled, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(
            scaled.codes,
            self.weight.t(),
            scale_a=scaled.scale,
            scale_b=self.weight_scale,
            out_dtype=dtype,
            use_fast_accum=True,
        )

    def _reference(self, scaled: Scaled, dtype: torch.dtype) -> Tensor:
        acc_MN = scaled.codes.double() @ self.weight.double().t()
        return (acc_MN * (scaled.scale.double() * self.weight_scale.double())).to(dtype)


def quantiser(*, rowwise: bool, on_gpu: bool) -> Quantise:
    """Triton's kernels on a GPU, torch's operations on the CPU: the same bits."""
    if not on_gpu:
        return quantise_rows if rowwise else quantise_tensor
    kernels = importlib.import_module(_KERNELS)
    chosen: Quantise = kernels.quantise_rows if rowwise else kernels.quantise_tensor
    return chosen


def reason(device: torch.device, capability: tuple[int, int]) -> str:
    """Why FP8 cannot be multiplied on that device, which needs `capability`; "" if it can."""
    if device.type == "cpu":
        return ""
    got = torch.cuda.get_device_capability(device)
    if got < capability:
        wanted, has = (".".join(map(str, pair)) for pair in (capability, got))
        return f"its FP8 matmul needs compute capability {wanted} or newer, this GPU has {has}"
    try:
        importlib.import_module(_KERNELS)
    except ImportError as error:
        return f"its activations are quantised by Triton, which cannot be imported ({error})"
    return ""


def route(device: torch.device, scales: str) -> str:
    """What runs: the reference of the maths on a CPU."""
    if device.type == "cpu":
        return f"CPU reference, exact products, {scales}"
    triton = importlib.import_module("triton").__version__
    return f"torch {torch.__version__} _scaled_mm, {scales}, quantised by triton {triton}"


def _stored(packed: PackedWeight) -> Scaled | None:
    if packed.quant.format != "float8_e4m3fn":
        return None
    return Scaled(packed.tensors["weight"], packed.tensors["weight_scale"].float())
