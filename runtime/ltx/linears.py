"""NVFP4 linears of the LTX denoiser: packed bytes in the order of our kernels, and which backend.

W4A16 (nvfp4_dequant) widens the weight at use. W4A4 (nvfp4_native) rounds the activations too, with
the file's static input_scale as the scale of the whole tensor and a scale per 16 values of each
call (ltx25.md 1.4). N output features, K input features, J = K / 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear import linear_builder
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.orders import PUBLISHED

ROWS_MULTIPLE, COLUMNS_MULTIPLE = 8, 32  # of N and K on FP4 tensor cores (1.4)
BACKENDS = ("nvfp4_dequant", "nvfp4_native", "nvfp4_kitchen_fallback")


def choose(
    layers: Mapping[str, LayerQuant],
    shapes: Mapping[str, tuple[int, int]],
    nvfp4: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    cached: bool = False,
) -> Callable[[PackedWeight, nn.Module], nn.Module]:
    """A `build_linear` for load_into. layers: the quantised ones, shapes: their [N, K]; nvfp4: one
    of BACKENDS.

    cached: what would be dequantised at use is widened to `dtype` at load and stays so (the whole
    published model then takes 42 GB). ValueError or Unavailable, before anything is read, for a
    backend that does not exist, does not run NVFP4 or does not run on the device.
    """
    if nvfp4 not in BACKENDS:
        raise ValueError(
            f"nvfp4 of an LTX plan must be one of {', '.join(BACKENDS)}, got {nvfp4!r}"
        )
    if nvfp4 == "nvfp4_native" and device.type == "cuda":
        _check_tensor_cores(layers, shapes, dtype)
    widened = (lambda layer: dtype) if cached else None
    return linear_builder({"nvfp4": nvfp4}, layers, device, cached=widened)


def _check_tensor_cores(
    layers: Mapping[str, LayerQuant], shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> None:
    """What a first step would find out after minutes."""
    narrow = [layer for layer, quant in layers.items() if not quant.full_precision]
    if narrow and dtype == torch.float32:
        raise Unavailable(
            "nvfp4_native",
            f"{len(narrow)} layers are nvfp4, whose matmul on a GPU gives no fp32, and dtype is "
            f"fp32; set dtype to bf16, or nvfp4 to nvfp4_dequant",
        )
    for layer in narrow:
        rows, columns = shapes[layer]
        if rows % ROWS_MULTIPLE or columns % COLUMNS_MULTIPLE:
            raise Unavailable(
                "nvfp4_native",
                f"layer {layer} has {rows} rows and {columns} columns, and the FP4 matmul needs "
                f"multiples of {ROWS_MULTIPLE} and {COLUMNS_MULTIPLE}; set nvfp4 to nvfp4_dequant",
            )


def in_published_order(packed: PackedWeight, order: str) -> PackedWeight:
    """The same NVFP4 layer with high nibbles first and tiled scales, read from another `order`."""
    tensors = dict(packed.tensors)
    if order.startswith("low"):
        codes = tensors["weight"]
        tensors["weight"] = (codes << 4) | (codes >> 4)
    if order.endswith("linear"):
        tensors["weight_scale"] = tiled(tensors["weight_scale"])
    return packed if order == PUBLISHED else replace(packed, tensors=tensors)


def tiled(scales_NJ: Tensor) -> Tensor:
    """E4M3 scales row by row to tiles of 128x4, each as 32 lines of 4x4; N and J fill the tiles."""
    rows, blocks = scales_NJ.shape
    tiles = scales_NJ.view(torch.uint8).view(rows // 128, 4, 32, blocks // 4, 4)
    in_order = tiles.permute(0, 3, 2, 1, 4).contiguous()
    return in_order.view(rows, blocks).view(scales_NJ.dtype)
