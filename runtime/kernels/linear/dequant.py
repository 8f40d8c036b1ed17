"""Packed weights back to floating point, in the rounding order of ComfyUI (contract 8.3 to 8.6).

Axes: N output features, K input features, L looked-up rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import comfy_kitchen as ck
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, CheckpointError, PackedWeight
from runtime.kernels.linear.int8_convrot import rotate
from runtime.kernels.linear.packed import PackedLinear

CUDA_VALUES = 1024  # per thread block of the NVFP4 kernel
ROW_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")  # rows can be read on their own


def dequantise(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N,K] in `dtype` (float32, bfloat16 or float16) on the device of its bytes.

    NVFP4 and FP8 cast codes and scales to `dtype` first and multiply there, so bfloat16 rounds
    twice; INT8 is computed in float32 and rounded once. `pre_quant_scale` belongs to the input and
    is not applied. Raises CheckpointError for a format without a decoder.
    """
    decode = _DECODERS.get(packed.quant.format)
    if decode is None:
        raise CheckpointError(
            f"layer {packed.layer} is stored as {packed.quant.format}; the formats that can be "
            f"dequantised are {', '.join(_DECODERS)}"
        )
    return decode(packed, dtype)


def dequantise_rows(packed: PackedWeight, ids_L: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `ids_L` of an embedding table as [L,K] in `dtype`; only these rows are dequantised.

    The product is formed in float32: value times scale (contract 0.1.9). Raises CheckpointError for
    a format whose rows cannot be read on their own (NVFP4).
    """
    if packed.quant.format not in ROW_FORMATS:
        raise CheckpointError(
            f"embedding {packed.layer} is stored as {packed.quant.format}; an embedding table must "
            f"be unquantised or one of {', '.join(ROW_FORMATS)}"
        )
    weight, scale = packed.tensors["weight"], packed.tensors["weight_scale"]
    bytes_LK = weight.view(torch.uint8)[ids_L]  # indexing has no float8 kernel
    rows_LK = bytes_LK.view(weight.dtype).float() * (scale[ids_L] if scale.numel() > 1 else scale)
    if packed.quant.convrot_group:
        rows_LK = rotate(rows_LK, packed.quant.convrot_group)
    return rows_LK.to(dtype)


class DequantisedLinear(PackedLinear):
    """Any packed format: the weight dequantised to x's dtype, activations untouched (8.3)."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...,K] -> [...,N] in x's dtype."""
        return F.linear(self.scaled_input(x), dequantise(self.packed, x.dtype), self.bias_as(x))


def _nvfp4(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    tensors = packed.tensors
    with nvfp4_kernel(tensors["weight"]):
        padded = ck.dequantize_nvfp4(
            tensors["weight"], tensors["weight_scale_2"], tensors["weight_scale"], dtype
        )
    rows, columns = packed.shape
    return padded[:rows, :columns]  # a view of itself unless the file padded to 16


def nvfp4_kernel(codes_NK: Tensor) -> AbstractContextManager[None]:
    """Which comfy-kitchen kernel decodes these packed bytes.

    Its CUDA kernel (0.2.31, compute-sanitizer on an H200) writes past the output unless the values
    are a multiple of 1024. Every published layer is; the others take kitchen's torch code.
    """
    if codes_NK.is_cuda and 2 * codes_NK.numel() % CUDA_VALUES:
        return ck.use_backend("eager")
    return nullcontext()


def _fp8(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    return ck.dequantize_per_tensor_fp8(
        packed.tensors["weight"], packed.tensors["weight_scale"], dtype
    )


def _int8(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    weight_NK = ck.dequantize_int8_simple(packed.tensors["weight"], packed.tensors["weight_scale"])
    if packed.quant.convrot_group:  # stored W @ H.T; H is symmetric and its own inverse
        weight_NK = rotate(weight_NK, packed.quant.convrot_group)
    return weight_NK.to(dtype)


def _unquantised(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    return packed.tensors["weight"].to(dtype)


_DECODERS: Mapping[str, Callable[[PackedWeight, torch.dtype], Tensor]] = {
    "nvfp4": _nvfp4,
    "float8_e4m3fn": _fp8,
    "float8_e5m2": _fp8,
    "int8_tensorwise": _int8,
    UNQUANTISED: _unquantised,
}
