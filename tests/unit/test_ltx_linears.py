"""NVFP4 linears of LTX: the contract's layout, element by element, and W4A4 with static scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear.dense import DenseLinear
from runtime.kernels.linear.dequant import DequantisedLinear, dequantise
from runtime.kernels.linear.nvfp4_native import NVFP4NativeLinear, activation_scale, quantise
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.linears import BACKENDS, choose, in_published_order, tiled
from runtime.ltx.load import open_denoiser
from runtime.ltx.orders import ORDERS
from tests.ltx_files import packed as stored
from tests.ltx_files import untiled, weights, write_nvfp4

CPU = torch.device("cpu")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAMES = (
    "transformer_blocks.0.attn1.to_q",
    "transformer_blocks.0.ff.net.0.proj",
    "transformer_blocks.0.audio_ff.net.2",
)
QUANT = LayerQuant(format="nvfp4")
SHAPES = {"transformer_blocks.0.ff.net.2": (144, 128)}


def layer_of(
    weight_NK: Tensor, order: str = "high_tiled", bias: Tensor | None = None
) -> PackedWeight:
    tensors = stored(weight_NK, order)
    tensors |= {} if bias is None else {"bias": bias}
    shape = (weight_NK.shape[0], weight_NK.shape[1])
    return PackedWeight(
        layer="transformer_blocks.0.ff.net.2", quant=QUANT, shape=shape, tensors=tensors
    )


def by_formula(tensors: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    """The weight, value by value: high nibble first, scales at the contract's byte offsets."""
    codes, second = tensors["weight"].tolist(), tensors["weight_scale_2"].item()
    scales = tensors["weight_scale"].reshape(-1).float().tolist()
    tiles = -(-columns // 64)  # of four scales, beside each other
    out = torch.empty(rows, columns, dtype=torch.float64)
    for r in range(rows):
        for k in range(columns):
            byte = codes[r][k // 2]
            code = byte >> 4 if k % 2 == 0 else byte & 15
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            c = k // 16
            at = ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
            out[r, k] = value * scales[at] * second
    return out


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(rows, columns // 16, 16, generator=generator)
    return (blocks * torch.randn(rows, columns // 16, 1, generator=generator).exp()).view(
        rows, columns
    )


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (256, 128), (144, 96), (24, 32)])
def test_the_weight_is_the_contracts_value_by_value(rows: int, columns: int) -> None:
    packed = layer_of(uneven(rows, columns))
    wanted = by_formula(dict(packed.tensors), rows, columns)
    got = dequantise(packed, torch.float32)[:rows, :columns].double()
    assert (got - wanted).abs().max() <= 2e-7 * wanted.abs().max()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_brought_to_the_published_one(order: str) -> None:
    weight = uneven(256, 128)
    wanted = layer_of(weight).tensors
    got = in_published_order(layer_of(weight, order), order).tensors
    assert torch.equal(got["weight"], wanted["weight"])
    assert torch.equal(got["weight_scale"].float(), wanted["weight_scale"].float())


def test_tiling_is_the_inverse_of_the_contracts_offsets() -> None:
    scales = normal(384, 12).abs().mul(100).to(torch.float8_e4m3fn)
    assert torch.equal(untiled(tiled(scales)).float(), scales.float())
    assert not torch.equal(tiled(scales).float(), scales.float())


def test_layers_of_a_file_are_their_weights_but_for_four_bits(tmp_path: Path) -> None:
    checkpoint = open_denoiser(write_nvfp4(tmp_path / "a.safetensors"))
    source = weights()
    for name in NAMES:
        got, wanted = dequantise(checkpoint.packed(name), torch.float32), source[f"{name}.weight"]
        error = (
            got - wanted.float()
        ).square().mean().sqrt() / wanted.float().square().mean().sqrt()
        assert 0.085 < error < 0.115


def test_w4a4_takes_the_files_input_scale_and_no_other() -> None:
    x = normal(9, 128).bfloat16()
    packed = layer_of(uneven(144, 128))
    linear = choose({packed.layer: QUANT}, SHAPES, "nvfp4_native", CPU, torch.bfloat16)(
        packed, nn.Module()
    )
    assert isinstance(linear, NVFP4NativeLinear)
    assert torch.equal(activation_scale(x, linear.input_scale), packed.tensors["input_scale"])
    larger = dict(packed.tensors) | {"input_scale": 3 * packed.tensors["input_scale"]}
    other = NVFP4NativeLinear(
        PackedWeight(layer=packed.layer, quant=QUANT, shape=packed.shape, tensors=larger)
    )
    assert not torch.equal(linear(x), other(x))
    # A row stays as it is whatever comes with it: no scale is taken from all rows.
    loud = torch.cat([x, 40 * x[:1]])
    assert torch.equal(linear(loud)[:9], linear(x))


def test_w4a4_on_the_cpu_is_the_exact_product_of_both_roundings() -> None:
    x = normal(24, 128).bfloat16()
    bias = normal(144).bfloat16()
    packed = layer_of(uneven(144, 128), bias=bias)
    scale = packed.tensors["input_scale"]
    codes, blocks = quantise(x, scale)
    rounded = {"weight": codes, "weight_scale": blocks, "weight_scale_2": scale}
    x_wide = by_formula(rounded, 24, 128)
    wanted = x_wide @ by_formula(dict(packed.tensors), 144, 128).t() + bias.double()
    linear = choose({packed.layer: QUANT}, SHAPES, "nvfp4_native", CPU, torch.bfloat16)(
        packed, nn.Module()
    )
    got = linear(x)
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    plain = F.linear(x.float(), dequantise(packed, torch.float32), bias.float())
    error = (got.float() - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert 0.05 < error < 0.15  # activations of four bits show


def test_w4a16_rounds_no_activation() -> None:
    x = normal(9, 128)
    packed = layer_of(uneven(144, 128))
    linear = choose({packed.layer: QUANT}, SHAPES, "nvfp4_dequant", CPU, torch.float32)(
        packed, nn.Module()
    )
    assert isinstance(linear, DequantisedLinear)
    assert torch.equal(linear(x), F.linear(x, dequantise(packed, torch.float32)))


def test_cached_weights_give_the_same_bits_and_are_wide() -> None:
    x = normal(9, 128).bfloat16()
    packed = layer_of(uneven(144, 128))
    layers = {packed.layer: QUANT}
    at_use = choose(layers, SHAPES, "nvfp4_dequant", CPU, torch.bfloat16)(packed, nn.Module())
    kept = choose(layers, SHAPES, "nvfp4_dequant", CPU, torch.bfloat16, cached=True)(
        packed, nn.Module()
    )
    assert isinstance(kept, DenseLinear)
    assert kept.weight.dtype == torch.bfloat16
    assert torch.equal(at_use(x), kept(x))


@pytest.mark.parametrize("name", ["fp8_dequant", "dense", "w4a4", ""])
def test_another_backend_is_refused_with_the_three_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"must be one of {', '.join(BACKENDS)}, got"):
        choose({}, {}, name, CPU, torch.bfloat16)


def test_w4a4_needs_blackwell_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    layers, gpu = {"transformer_blocks.0.ff.net.2": QUANT}, torch.device("cuda", 0)
    with pytest.raises(Unavailable, match=r"compute capability 10\.0 \(Blackwell\), .* has 9\.0"):
        choose(layers, SHAPES, "nvfp4_native", gpu, torch.bfloat16)
    with pytest.raises(Unavailable, match="set dtype to bf16"):
        choose(layers, SHAPES, "nvfp4_native", gpu, torch.float32)
    assert choose(layers, SHAPES, "nvfp4_dequant", gpu, torch.float32)


@pytest.mark.parametrize("shape", [(12, 64), (16, 48)])
def test_w4a4_on_a_gpu_refuses_a_layer_of_odd_size_by_name(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    layers, shapes = {"a": QUANT}, {"a": shape}
    with pytest.raises(Unavailable, match=rf"layer a has {shape[0]} rows and {shape[1]} columns"):
        choose(layers, shapes, "nvfp4_native", torch.device("cuda", 0), torch.bfloat16)
    assert choose(layers, shapes, "nvfp4_native", CPU, torch.bfloat16)


def test_a_layer_flagged_full_precision_is_widened_whatever_is_named() -> None:
    packed = layer_of(uneven(144, 128))
    layers = {packed.layer: LayerQuant(format="nvfp4", full_precision=True)}
    built = choose(layers, SHAPES, "nvfp4_native", CPU, torch.bfloat16)(packed, nn.Module())
    assert isinstance(built, DequantisedLinear)
