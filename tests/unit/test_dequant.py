"""Packed weights to floating point: the rounding order of each format (contract 8.3 to 8.6)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.base import CheckpointError, LayerQuant, PackedWeight
from runtime.kernels.linear.dequant import dequantise, dequantise_rows

SCALE = 0.0371
H4 = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])


def packed(format: str, group: int = 0, **tensors: Tensor) -> PackedWeight:
    rows, columns = tensors["weight"].shape
    return PackedWeight(
        layer="mlp.fc1",
        quant=LayerQuant(format=format, convrot_group=group),
        shape=(rows, columns * 2 if format == "nvfp4" else columns),
        tensors=tensors,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_rounds_its_scale_before_the_product(format: str, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 40).to(getattr(torch, format))
    got = dequantise(packed(format, weight=weight, weight_scale=torch.tensor(SCALE)), dtype)
    assert got.dtype == dtype
    assert torch.equal(got, weight.to(dtype) * torch.tensor(SCALE).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_rounds_the_product_of_its_scales_before_the_codes(dtype: torch.dtype) -> None:
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (32, 64))  # one scale tile; even columns in the high half
    blocks = (torch.rand(32, 4) * 200 + 1).to(torch.float8_e4m3fn)
    swizzled = torch.zeros(128, 4, dtype=torch.uint8)
    swizzled.view(32, 4, 4)[:, 0] = blocks.view(torch.uint8)
    weight = packed(
        "nvfp4",
        weight=(codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8),
        weight_scale=swizzled.view(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor(SCALE),
    )
    values = (levels[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)).to(dtype)
    scales = torch.tensor(SCALE).to(dtype) * blocks.to(dtype)
    assert torch.equal(dequantise(weight, dtype), values * scales.repeat_interleave(16, dim=1))


@pytest.mark.parametrize("scale", [torch.tensor(SCALE), torch.rand(24, 1)], ids=["tensor", "row"])
def test_int8_is_computed_in_fp32_and_rounded_once(scale: Tensor) -> None:
    weight = torch.randint(-127, 128, (24, 64), dtype=torch.int8)
    got = dequantise(packed("int8_tensorwise", weight=weight, weight_scale=scale), torch.bfloat16)
    assert torch.equal(got, (weight.float() * scale).bfloat16())


@pytest.mark.parametrize("group", [4, 16, 64])
def test_rotated_int8_is_turned_back_group_by_group(group: int) -> None:
    h = H4
    while len(h) < group:
        h = torch.kron(h, H4)
    weight = torch.randint(-127, 128, (24, 128), dtype=torch.int8)
    layer = packed("int8_tensorwise", group, weight=weight, weight_scale=torch.rand(24, 1))
    scaled = weight.float() * layer.tensors["weight_scale"]
    want = (scaled.view(24, -1, group) @ (h / group**0.5)).view(24, 128)
    torch.testing.assert_close(dequantise(layer, torch.float32), want)
    ids = torch.tensor([5, 0, 5])
    torch.testing.assert_close(dequantise_rows(layer, ids, torch.float32), want[ids])


def test_a_format_without_a_decoder_is_refused_by_name_and_layer() -> None:
    layer = packed("mxfp8", weight=torch.zeros(4, 32))
    with pytest.raises(CheckpointError, match=r"mlp\.fc1 is stored as mxfp8; the formats that can"):
        dequantise(layer, torch.float32)
