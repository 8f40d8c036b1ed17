"""Linear backends: refusals, and each format against formulas written out here (contract 8)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import comfy_kitchen as ck
import numpy as np
import pytest
import torch
from comfy_kitchen.constraints import FunctionConstraints, ParamConstraint
from comfy_kitchen.registry import registry
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear import BACKENDS, fp8_native, linear_backend, linear_builder
from runtime.kernels.linear.dequant import DequantisedLinear, dequantise
from runtime.kernels.linear.fp8_native import FP8NativeLinear, reference
from runtime.kernels.linear.nvfp4_kitchen_fallback import NVFP4KitchenFallbackLinear
from runtime.kernels.linear.nvfp4_native import NVFP4NativeLinear, activation_scale, quantise
from runtime.kernels.unavailable import Unavailable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
ALL = {
    "nvfp4": "nvfp4_native",
    "float8_e4m3fn": "fp8_native",
    "int8_tensorwise": "int8_convrot",
}
PLAIN = nn.Linear(1, 1)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """torch then reports a CUDA device of that compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


# ---- formulas


def e2m1(code: int) -> float:
    """Sign, two exponent bits, one mantissa bit."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code & 8 else size


def scale_byte(row: int, block: int, tiles: int) -> int:
    """Where the scale of (row, 16-column block) stands (contract 8.3)."""
    tile = (row // 128) * tiles + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4


def nvfp4_values(weight_u8: Tensor, scales: Tensor, rows: int, columns: int) -> NDArray[np.float64]:
    """Codes times block scales in float64, every byte looked up on its own."""
    tiles = math.ceil(columns / 16 / 4)
    stored = scales.contiguous().view(torch.uint8).flatten()
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    out = np.zeros((rows, columns))
    for row, column in itertools.product(range(rows), range(columns)):
        byte = int(weight_u8[row, column // 2])
        code = byte >> 4 if column % 2 == 0 else byte & 15
        out[row, column] = e2m1(code) * table[int(stored[scale_byte(row, column // 16, tiles)])]
    return out


def nvfp4_weight(
    rows: int, columns: int, *, bias: bool = True, flagged: bool = False, **extra: Tensor
) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows * columns)
    padded = (math.ceil(rows / 128) * 128, math.ceil(columns / 16 / 4) * 4)
    scales = torch.rand(padded, generator=generator) * 300 + 1
    tensors = {
        "weight": torch.randint(0, 256, (rows, columns // 2), generator=generator).to(torch.uint8),
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.00037),
    }
    if bias:
        tensors["bias"] = torch.randn(rows, generator=generator)
    return PackedWeight(
        layer="blocks.0.mlp.fc1",
        quant=LayerQuant(format="nvfp4", full_precision=flagged),
        shape=(rows, columns),
        tensors=tensors | extra,
    )


def fp8_weight(rows: int, columns: int, *, flagged: bool = False, **extra: Tensor) -> PackedWeight:
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator) * 96
    return PackedWeight(
        layer="blocks.0.mlp.fc1",
        quant=LayerQuant(format="float8_e4m3fn", full_precision=flagged),
        shape=(rows, columns),
        tensors={
            "weight": weight.to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor(0.0021),
            "bias": torch.randn(rows, generator=generator),
        }
        | extra,
    )


def int8_weight(*, flagged: bool = False) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    return PackedWeight(
        layer="blocks.0.mlp.fc2",
        quant=LayerQuant(format="int8_tensorwise", convrot_group=16, full_precision=flagged),
        shape=(32, 64),
        tensors={
            "weight": torch.randint(-128, 128, (32, 64), generator=generator).to(torch.int8),
            "weight_scale": torch.rand(32, 1, generator=generator) / 100 + 1e-3,
        },
    )


def inputs(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


# ---- registry and refusals


def build(names: Mapping[str, str], weight: PackedWeight, device: torch.device = CPU) -> nn.Module:
    """The module of a checkpoint's one quantised layer."""
    return linear_builder(names, {weight.layer: weight.quant}, device)(weight, PLAIN)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_has_its_own_name_and_runs_or_has_a_reference_on_the_cpu(name: str) -> None:
    backend = linear_backend(name)
    assert backend.name == name
    reason = backend.reason(CPU)
    if name == "quack":
        assert backend.reference is not None and reason.startswith("it needs a CUDA GPU")
        return
    assert reason == "" or (name == "fp8_native" and "no FP8 matmul for this CPU" in reason)
    assert backend.route(CPU)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"nvfp4_dequant, nvfp4_native, .*, got 'nvfp4_fast'"):
        linear_builder({"nvfp4": "nvfp4_fast"}, {}, CPU)


def test_native_nvfp4_is_refused_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 9, 0)
    with pytest.raises(
        Unavailable, match=r"'nvfp4_native' .* 10\.0 \(Blackwell\), this GPU has 9\.0"
    ):
        build(ALL, nvfp4_weight(32, 32), CUDA)


def test_native_nvfp4_is_refused_without_kitchens_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 12, 0)
    off = {"cuda": {"available": False, "unavailable_reason": "CUDA 12"}}
    monkeypatch.setattr(ck, "list_backends", lambda: off)
    with pytest.raises(
        Unavailable, match=r"comfy-kitchen's CUDA backend is not available.*CUDA 12"
    ):
        build(ALL, nvfp4_weight(32, 32), CUDA)


def test_native_nvfp4_is_refused_where_kitchen_found_no_cublaslt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpu(monkeypatch, 12, 0)
    without = {"cuda": {"available": True, "capabilities": ["quantize_nvfp4"]}}
    monkeypatch.setattr(ck, "list_backends", lambda: without)
    with pytest.raises(Unavailable, match="no FP4 matmul"):
        build(ALL, nvfp4_weight(32, 32), CUDA)


def test_native_nvfp4_does_not_fall_back_to_kitchens_dequantising_matmul(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ck.scaled_mm_nvfp4 would: the registered CUDA kernel does not take these operands."""
    half = ParamConstraint(dtypes=frozenset({torch.float16}))
    refuses = FunctionConstraints(params={"out_dtype": half})
    monkeypatch.setitem(registry._backends, "cuda", object())
    monkeypatch.setitem(registry._capabilities, "cuda", {"scaled_mm_nvfp4"})
    monkeypatch.setitem(registry._constraints, ("cuda", "scaled_mm_nvfp4"), refuses)
    linear, x = NVFP4NativeLinear(nvfp4_weight(32, 32)), inputs(16, 32, BF16)
    rows = linear.packed_rows(x)
    with ck.use_backend("cuda"):
        chosen = registry.get_capable_backend("scaled_mm_nvfp4", {"out_dtype": BF16})
    assert chosen == "eager"
    with pytest.raises(Unavailable, match=r"'nvfp4_native' .* layer blocks\.0\.mlp\.fc1"):
        linear._tensor_cores(rows)


@pytest.mark.parametrize(
    ("weight", "capability", "said"),
    [(fp8_weight(16, 16), (8, 6), r"FP8 .* 8\.9"), (int8_weight(), (7, 0), r"INT8 .* 7\.5")],
    ids=["fp8", "int8"],
)
def test_native_fp8_and_int8_are_refused_on_older_gpus(
    monkeypatch: pytest.MonkeyPatch, weight: PackedWeight, capability: tuple[int, int], said: str
) -> None:
    fake_gpu(monkeypatch, *capability)
    with pytest.raises(Unavailable, match=said):
        build(ALL, weight, CUDA)


def test_a_format_without_a_backend_is_refused_by_format_and_layer() -> None:
    said = r"layer blocks\.0\.mlp\.fc1 is nvfp4, allowed are float8_e4m3fn"
    with pytest.raises(Unavailable, match=said):
        build({"float8_e4m3fn": "fp8_native"}, nvfp4_weight(32, 32))


def test_a_backend_that_does_not_run_the_format_is_refused() -> None:
    said = r"'fp8_native' .* layer blocks\.0\.mlp\.fc1 is nvfp4, and it runs float8_e4m3fn"
    with pytest.raises(Unavailable, match=said):
        build(ALL | {"nvfp4": "fp8_native"}, nvfp4_weight(32, 32))


def test_a_layer_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, 9, 0)
    with pytest.raises(Unavailable, match="nvfp4_native"):
        linear_builder(ALL, {"blocks.7.mlp.fc1": LayerQuant(format="nvfp4")}, CUDA)


def test_each_format_goes_to_its_named_backend() -> None:
    names = ALL | {"nvfp4": "nvfp4_kitchen_fallback"}
    assert type(build(names, nvfp4_weight(32, 32))) is NVFP4KitchenFallbackLinear
    assert type(build(names, fp8_weight(16, 16))) is FP8NativeLinear


@pytest.mark.parametrize(
    "weight",
    [
        nvfp4_weight(32, 32, flagged=True),
        fp8_weight(32, 32, flagged=True),
        int8_weight(flagged=True),
    ],
    ids=["nvfp4", "fp8", "int8"],
)
def test_a_layer_flagged_full_precision_is_dequantised_whatever_the_plan_names(
    weight: PackedWeight,
) -> None:
    module = build(ALL, weight)
    assert type(module) is DequantisedLinear
    x = inputs(5, weight.shape[1], BF16)
    bias = weight.tensors.get("bias")
    want = F.linear(x, dequantise(weight, BF16), None if bias is None else bias.to(BF16))
    assert torch.equal(module(x), want)


# ---- NVFP4


def test_all_256_bytes_decode_to_two_codes_high_nibble_first() -> None:
    weight = PackedWeight(
        layer="layer",
        quant=LayerQuant(format="nvfp4"),
        shape=(32, 16),
        tensors={
            "weight": torch.arange(256, dtype=torch.uint8).reshape(32, 8),
            "weight_scale": torch.ones(128, 4).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(1.0),
        },
    )
    want = [value for byte in range(256) for value in (e2m1(byte >> 4), e2m1(byte & 15))]
    for dtype in (torch.float32, BF16):
        assert dequantise(weight, dtype).flatten().tolist() == want
    assert want[-2:] == [-6.0, -6.0]  # 0xff


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (200, 96), (256, 16), (130, 144)])
def test_scales_stand_where_the_contract_says_across_tiles(rows: int, columns: int) -> None:
    weight = nvfp4_weight(rows, columns)
    one = dict(weight.tensors) | {"weight_scale_2": torch.tensor(1.0)}
    unscaled = PackedWeight(layer="x", quant=weight.quant, shape=weight.shape, tensors=one)
    want = nvfp4_values(one["weight"], one["weight_scale"], rows, columns)
    assert np.array_equal(dequantise(unscaled, torch.float32).double().numpy(), want)


def literal_quantise(x: Tensor, scale: Tensor) -> NDArray[np.float64]:
    """x over the per-tensor scale, rounded: block scales to e4m3, values to e2m1, ties to even."""
    out = np.zeros(tuple(x.shape))
    for row, first in itertools.product(range(x.shape[0]), range(0, x.shape[1], 16)):
        block = x[row, first : first + 16].float()
        stored = (block.abs().amax() / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn).float()
        if stored == 0:
            continue
        for i, value in enumerate((block / (scale * stored)).clamp(-6, 6).tolist()):
            code = min(range(16), key=lambda code: (abs(e2m1(code) - value), code & 1))
            out[row, first + i] = e2m1(code) * float(stored)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [1, 16, 21])
def test_native_nvfp4_on_the_cpu_is_the_float64_product_of_both_quantised_operands(
    rows: int, dtype: torch.dtype
) -> None:
    weight = nvfp4_weight(48, 64)
    x = inputs(rows, 64, dtype)
    got = NVFP4NativeLinear(weight)(x)
    tensors = weight.tensors
    scale = activation_scale(x, None)
    w = nvfp4_values(tensors["weight"], tensors["weight_scale"], 48, 64)
    exact = literal_quantise(x, scale) @ w.T * float(scale) * float(tensors["weight_scale_2"])
    exact = exact + tensors["bias"].to(dtype).double().numpy()
    assert got.shape == (rows, 48) and got.dtype == dtype
    error = np.linalg.norm(got.double().numpy() - exact) / np.linalg.norm(exact)
    assert error < (1e-6 if dtype == torch.float32 else 2.5e-3)


def test_native_nvfp4_rounds_once_after_the_bias() -> None:
    weight = nvfp4_weight(48, 64)
    x = inputs(16, 64, BF16)
    scale = activation_scale(x, None)  # the same codes for both widths
    narrow = NVFP4NativeLinear(nvfp4_weight(48, 64, input_scale=scale))(x)
    wide = NVFP4NativeLinear(nvfp4_weight(48, 64, bias=False, input_scale=scale))(x.float())
    bias = weight.tensors["bias"].to(BF16).float()
    assert torch.equal(narrow, (wide + bias).to(BF16))
    assert not torch.equal(narrow, (wide.to(BF16) + bias.to(BF16)))


def test_the_dynamic_activation_scale_is_divided_in_the_activations_dtype() -> None:
    x = torch.tensor([[0.5, -3.203125, 1.0]], dtype=BF16)
    got = activation_scale(x, None)
    assert got.dtype == torch.float32
    assert torch.equal(got, (torch.tensor(3.203125, dtype=BF16) / 2688).float())
    assert not torch.equal(got, torch.tensor(3.203125) / 2688)
    assert torch.equal(activation_scale(x.float(), None), torch.tensor(3.203125) / 2688)


def test_a_stored_input_scale_replaces_the_dynamic_one() -> None:
    stored = torch.tensor(0.011)
    assert torch.equal(activation_scale(inputs(3, 16, BF16), stored), stored)
    x = inputs(5, 64, torch.float32)
    dynamic = NVFP4NativeLinear(nvfp4_weight(48, 64))(x)
    fixed = NVFP4NativeLinear(nvfp4_weight(48, 64, input_scale=stored))(x)
    assert not torch.equal(dynamic, fixed)


def test_the_dynamic_scale_looks_at_every_row() -> None:
    x = inputs(32, 16, torch.float32)
    x[31, 3] = 50
    assert float(activation_scale(x, None)) == pytest.approx(50 / 2688)


def test_rows_are_padded_to_sixteen_with_zeros() -> None:
    x = inputs(21, 64, torch.float32)
    codes, _ = quantise(x, activation_scale(x, None))
    assert codes.shape == (32, 32)
    assert not codes[21:].any()


@pytest.mark.parametrize("module", [NVFP4NativeLinear, NVFP4KitchenFallbackLinear])
def test_a_zero_row_among_others_gives_the_bias(module: type[nn.Module]) -> None:
    weight = nvfp4_weight(48, 64)
    x = inputs(4, 64, BF16)
    x[2] = 0
    assert torch.equal(module(weight)(x)[2], weight.tensors["bias"].to(BF16))


def test_the_kitchen_fallback_multiplies_dequantised_operands() -> None:
    weight = nvfp4_weight(48, 64)
    x = inputs(16, 64, torch.float32)
    scale = activation_scale(x, None)
    rounded = torch.from_numpy(literal_quantise(x, scale)).float() * scale
    want = F.linear(rounded, dequantise(weight, torch.float32), weight.tensors["bias"])
    torch.testing.assert_close(NVFP4KitchenFallbackLinear(weight)(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "module", [DequantisedLinear, NVFP4NativeLinear, NVFP4KitchenFallbackLinear]
)
def test_pre_quant_scale_multiplies_the_input_first(module: type[nn.Module]) -> None:
    factors = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5
    x = inputs(16, 64, BF16)
    scaled = module(nvfp4_weight(48, 64, pre_quant_scale=factors))(x)
    assert torch.equal(scaled, module(nvfp4_weight(48, 64))(x * factors.to(BF16)))
    assert not torch.equal(scaled, module(nvfp4_weight(48, 64))(x))


@pytest.mark.parametrize(
    "module", [DequantisedLinear, NVFP4NativeLinear, NVFP4KitchenFallbackLinear]
)
def test_leading_axes_are_kept(module: type[nn.Module]) -> None:
    linear = module(nvfp4_weight(48, 64))
    x = inputs(6, 64, torch.float32).reshape(2, 3, 64)
    assert torch.equal(linear(x).flatten(0, 1), linear(x.flatten(0, 1)))


# ---- FP8


def test_native_fp8_clamps_activations_to_448_and_does_not_scale_them() -> None:
    weight = fp8_weight(32, 64)
    x = inputs(16, 64, torch.float32) * 300
    assert float(x.abs().max()) > 448
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    tensors = weight.tensors
    exact = codes @ tensors["weight"].double().t() * tensors["weight_scale"].double()
    exact = exact + tensors["bias"].double()
    got = FP8NativeLinear(weight)(x)
    assert float((got.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("input_scale", [None, torch.tensor(0.5)])
def test_native_fp8_has_a_reference_that_needs_no_fp8_matmul(input_scale: Tensor | None) -> None:
    extra = {} if input_scale is None else {"input_scale": input_scale}
    weight, x = fp8_weight(32, 64, **extra), inputs(16, 64, torch.float32).reshape(2, 8, 64)
    got, want = reference(weight, x), FP8NativeLinear(weight)(x)
    assert got.shape == (2, 8, 32) and got.dtype == torch.float32
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_a_cpu_without_an_fp8_matmul_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> Tensor:
        raise RuntimeError("could not create a primitive. Run with ONEDNN_VERBOSE=all")

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    said = r"'fp8_native' .* no FP8 matmul for this CPU \(could not create a primitive\)"
    fp8_native._cpu_reason.cache_clear()
    try:
        with pytest.raises(Unavailable, match=said):
            build({"float8_e4m3fn": "fp8_native"}, fp8_weight(32, 64))
    finally:
        fp8_native._cpu_reason.cache_clear()


def test_native_fp8_divides_by_a_stored_input_scale() -> None:
    scale = torch.tensor(0.5)  # a power of two: exact in every dtype
    weight = fp8_weight(32, 64, input_scale=scale)
    x = inputs(16, 64, torch.float32)
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    tensors = weight.tensors
    exact = codes @ tensors["weight"].double().t() * tensors["weight_scale"].double() * 0.5
    exact = exact + tensors["bias"].double()
    got = FP8NativeLinear(weight)(x)
    assert float((got.double() - exact).norm() / exact.norm()) < 1e-5


def test_native_fp8_keeps_leading_axes_and_dtype() -> None:
    y = FP8NativeLinear(fp8_weight(32, 64))(inputs(16, 64, BF16).reshape(4, 4, 64))
    assert y.shape == (4, 4, 32) and y.dtype == BF16
