"""Packed weights on a GPU: the CPU's values, and not a byte written beside them."""

from __future__ import annotations

import pytest
import torch

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.nvfp4_native import activation_scale, quantise

pytestmark = pytest.mark.gpu

SHAPES = [(16, 48), (48, 16), (16, 16), (80, 320), (96, 112), (128, 64), (1024, 5120)]


def packed(shape: tuple[int, int], device: str) -> PackedWeight:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    scale = activation_scale(weight, None)
    codes, blocks = quantise(weight, scale)
    tensors = {"weight": codes, "weight_scale": blocks, "weight_scale_2": scale}
    return PackedWeight(
        layer="layer",
        quant=LayerQuant(format="nvfp4"),
        shape=shape,
        tensors={name: tensor.to(device) for name, tensor in tensors.items()},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_values_are_the_cpus(shape: tuple[int, int]) -> None:
    want = dequantise(packed(shape, "cpu"), torch.float32)
    assert torch.equal(dequantise(packed(shape, "cuda"), torch.float32).cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_neighbours_in_memory_stay_as_they_are(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = packed(shape, "cuda")
    fences = [torch.full(shape, 7.0, dtype=dtype, device="cuda") for _ in range(65)]
    del fences[32]  # the hole that the output will take
    out = dequantise(weight, dtype)
    torch.cuda.synchronize()
    assert out.shape == shape
    assert all(bool((fence == 7.0).all()) for fence in fences)
