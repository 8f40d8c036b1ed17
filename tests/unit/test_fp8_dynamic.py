"""fp8_rowwise and fp8_tensorwise on the CPU: the maths that the GPU's kernels are held to."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.linears import narrow_layers
from runtime.h3.load import load_denoiser
from runtime.kernels.linear import linear_backend, linear_builder
from runtime.kernels.linear.dense import DenseLinear
from runtime.kernels.linear.dequant import DequantisedLinear, dequantise
from runtime.kernels.linear.fp8_dynamic import (
    FP8DynamicLinear,
    quantise_rows,
    quantise_tensor,
)
from runtime.kernels.scaled import AMAX_FLOOR
from runtime.kernels.unavailable import Unavailable
from tests.denoiser_parts import CPU, demo_plan, denoiser
from tests.unit.test_linear_backends import PLAIN, fake_gpu, fp8_weight, nvfp4_weight

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
NAMES = ("fp8_rowwise", "fp8_tensorwise")
RAGGED = (1, 17, 1021)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(features: int, width: int, *, bias: bool = True) -> PackedWeight:
    tensors = {"weight": (normal(features, width) * 0.1).to(BF16)}
    if bias:
        tensors["bias"] = normal(features, seed=1).to(BF16)
    quant = LayerQuant(format=UNQUANTISED)
    return PackedWeight(layer="x", quant=quant, shape=(features, width), tensors=tensors)


def built(name: str, packed: PackedWeight) -> FP8DynamicLinear:
    module = linear_backend(name).build(packed)
    assert isinstance(module, FP8DynamicLinear)
    return module


def nearest_e4m3(value: float) -> float:
    """From the 254 finite codes; a tie goes to the even code."""
    codes = [code for code in range(256) if code & 127 != 127]
    table = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    return min(zip(table, codes, strict=True), key=lambda c: (abs(c[0] - value), c[1] & 1))[0]


# ---- quantiser


def test_a_row_is_scaled_to_448_and_rounded_to_the_nearest_code() -> None:
    x = normal(5, 48) * torch.tensor([1e-6, 1.0, 30.0, 1e4, 0.0])[:, None]
    codes, scale = quantise_rows(x)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (5, 1)
    for row in range(5):
        amax = x[row].abs().max().clamp(min=AMAX_FLOOR)
        assert float(scale[row]) == float(amax / 448)
        want = [nearest_e4m3(float(v * (torch.tensor(448.0) / amax))) for v in x[row]]
        assert codes[row].double().tolist() == want
    assert float(codes[:4].float().abs().amax(dim=1).min()) == 448.0


def test_one_scale_for_all_is_that_of_the_largest_value() -> None:
    x = normal(17, 48).to(BF16)
    codes, scale = quantise_tensor(x)
    assert scale.shape == () and float(scale) == float(x.float().abs().max() / 448)
    assert torch.equal(
        codes.float(), (x.float() * (448 / x.float().abs().max())).to(codes.dtype).float()
    )


@pytest.mark.parametrize("quantise", [quantise_rows, quantise_tensor])
def test_zeros_stay_zero_and_what_is_not_finite_stays_so(quantise: object) -> None:
    codes, scale = quantise(torch.zeros(3, 16))  # type: ignore[operator]
    assert not codes.float().any() and torch.isfinite(scale).all()
    for value in (float("nan"), float("inf")):
        x = normal(3, 16)
        x[1, 2] = value
        codes, scale = quantise(x)  # type: ignore[operator]
        assert not torch.isfinite((codes.float() * scale)[1]).all()


# ---- product


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", RAGGED)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_of_the_codes_is_scaled_and_rounded_before_the_bias(
    name: str, count: int, bias: bool
) -> None:
    packed, x = layer(48, 64, bias=bias), normal(count, 64).to(BF16)
    module = built(name, packed)
    quantise = quantise_rows if name == "fp8_rowwise" else quantise_tensor
    (codes, scale), (weight, weight_scale) = quantise(x), quantise(packed.tensors["weight"])
    want = codes.double() @ weight.double().t() * (scale.double() * weight_scale.double().t())
    want = want.to(BF16)
    if bias:
        want = want + packed.tensors["bias"]
    got = module(x)
    assert got.dtype == BF16 and torch.equal(got, want)
    exact = x.double() @ packed.tensors["weight"].double().t()
    exact = exact + (packed.tensors["bias"].double() if bias else 0)
    assert 1e-3 < float((got - exact).norm() / exact.norm()) < 6e-2  # FP8's own error


@pytest.mark.parametrize("count", RAGGED)
def test_rows_of_fp8_rowwise_do_not_touch_each_other(count: int) -> None:
    module, x = built("fp8_rowwise", layer(48, 64)), normal(1021, 64).to(BF16)
    assert torch.equal(module(x)[:count], module(x[:count]))


def test_rows_of_fp8_tensorwise_share_a_scale() -> None:
    module, x = built("fp8_tensorwise", layer(48, 64)), normal(1021, 64).to(BF16)
    x[-1] *= 3
    assert not torch.equal(module(x)[:17], module(x[:17]))


@pytest.mark.parametrize("name", NAMES)
def test_leading_axes_are_kept_and_pre_quant_scale_comes_first(name: str) -> None:
    packed, x = layer(48, 64), normal(6, 64).to(BF16)
    module = built(name, packed)
    assert torch.equal(module(x.reshape(2, 3, 64)), module(x).reshape(2, 3, 48))
    factors = normal(64, seed=3).abs() + 0.5
    tensors = dict(packed.tensors) | {"pre_quant_scale": factors}
    scaled = PackedWeight(layer="x", quant=packed.quant, shape=packed.shape, tensors=tensors)
    assert torch.equal(built(name, scaled)(x), module(x * factors.to(BF16)))


# ---- stored forms


@pytest.mark.parametrize("name", NAMES)
def test_stored_fp8_codes_stay_as_they_are(name: str) -> None:
    packed = fp8_weight(32, 64)
    module = built(name, packed)
    assert module.weight.data_ptr() == packed.tensors["weight"].data_ptr()
    assert set(module.weight_scale.flatten().tolist()) == {float(packed.tensors["weight_scale"])}


def test_an_nvfp4_weight_is_quantised_from_its_fp32_values_and_its_bytes_are_let_go() -> None:
    packed = nvfp4_weight(48, 64)
    module = built("fp8_rowwise", packed)
    want = quantise_rows(dequantise(packed, torch.float32))
    assert torch.equal(module.weight.float(), want.codes.float())
    assert torch.equal(module.weight_scale, want.scale.t())
    assert set(module.packed.tensors) == {"weight", "weight_scale", "bias"}
    assert all(t.dtype != torch.uint8 for t in module.packed.tensors.values())


# ---- refusals


@pytest.mark.parametrize(
    ("name", "capability", "said"),
    [
        ("fp8_rowwise", (8, 9), r"needs compute capability 9\.0 or newer, this GPU has 8\.9"),
        ("fp8_tensorwise", (8, 6), r"needs compute capability 8\.9 or newer, this GPU has 8\.6"),
    ],
)
def test_an_older_gpu_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], said: str
) -> None:
    fake_gpu(monkeypatch, *capability)
    with pytest.raises(Unavailable, match=rf"'{name}' .* {said}"):
        linear_builder(
            {UNQUANTISED: name}, {"x": LayerQuant(format=UNQUANTISED)}, CUDA, narrow={"x"}
        )


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 9, 0)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "runtime.kernels.linear.triton_fp8", raising=False)
    assert "quantised by Triton, which cannot be imported" in linear_backend("fp8_rowwise").reason(
        CUDA
    )


def test_a_plan_with_another_name_or_fp32_on_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="dense must be one of dense, quack, fp8_rowwise, fp8_"):
        demo_plan(dense="fp8")
    with pytest.raises(ValueError, match="weights must be one of packed, cached, got 'wide'"):
        demo_plan(weights="wide")
    with pytest.raises(ValueError, match="dtype must be bf16 for fp8_rowwise on a GPU, got 'fp32'"):
        demo_plan(nvfp4="fp8_rowwise", device="cuda")


# ---- the denoiser


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["pruned_bf16", "pruned_nvfp4", "full_fp8"])
def test_only_the_four_linears_of_each_block_become_fp8(name: str, form: str) -> None:
    model = denoiser(form, dtype="bf16", dense=name, nvfp4=name, fp8=name)
    narrow = {n for n, module in model.named_modules() if isinstance(module, FP8DynamicLinear)}
    assert narrow == narrow_layers(model)
    assert {n.split(".", 2)[2] for n in narrow} == {
        "attn.qkv_proj",
        "attn.out_proj",
        "mlp.fc1",
        "mlp.fc2",
    }
    assert len(narrow) == 4 * len(model.blocks)


def test_fp4_products_in_fp32_on_a_gpu_are_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpu(monkeypatch, 12, 0)
    monkeypatch.setattr("runtime.kernels.linear.nvfp4_native.reason", lambda device: "")
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_nvfp4")
    plan = demo_plan(nvfp4="nvfp4_native", device="cuda")
    with pytest.raises(Unavailable, match=r"gives no fp32, and the plan's dtype is fp32"):
        load_denoiser(checkpoint, plan, torch.device("cuda"))


def test_a_flagged_layer_and_one_outside_the_blocks_are_widened() -> None:
    layers = {
        "blocks.0.mlp.fc1": LayerQuant(format="nvfp4", full_precision=True),
        "blocks.0.adaln_proj.linear": LayerQuant(format="nvfp4"),
    }
    build = linear_builder({"nvfp4": "fp8_rowwise"}, layers, CPU, narrow={"blocks.0.mlp.fc1"})
    for name, quant in layers.items():
        packed = nvfp4_weight(32, 32)
        own = PackedWeight(layer=name, quant=quant, shape=packed.shape, tensors=packed.tensors)
        assert type(build(own, PLAIN)) is DequantisedLinear


@pytest.mark.parametrize("form", ["pruned_nvfp4", "full_fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_cached_weights_give_the_bits_of_packed_ones(form: str, dtype: str) -> None:
    packed, cached = denoiser(form, dtype=dtype), denoiser(form, dtype=dtype, weights="cached")
    compared = 0
    for name, module in packed.named_modules():
        if not isinstance(module, DequantisedLinear):
            continue
        wide = cached.get_submodule(name)
        assert isinstance(wide, DenseLinear) and set(wide.packed.tensors) <= {"weight", "bias"}
        x = normal(17, module.in_features).to(wide.weight.dtype)
        assert torch.equal(wide(x), module(x))
        compared += 1
    assert compared and not any(isinstance(m, DequantisedLinear) for m in cached.modules())


def test_loading_counts_every_byte_of_converted_layers() -> None:
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    told: list[tuple[int, int]] = []
    plan = demo_plan(dtype="bf16", dense="fp8_rowwise")
    _, report = load_denoiser(checkpoint, plan, CPU, lambda *progress: told.append(progress))
    assert told[-1] == (report.bytes, report.bytes)
