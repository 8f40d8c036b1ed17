"""The int8 linear against integer and float64 arithmetic written out independently."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear import BACKENDS, linear_backend
from runtime.kernels.linear import int8_convrot as module
from runtime.kernels.linear.int8_convrot import Int8ConvRotLinear, hadamard, multiply, rotate

CPU = torch.device("cpu")


def packed(num_out: int, num_in: int, *, group: int, bias: bool = True) -> PackedWeight:
    generator = torch.Generator().manual_seed(num_out * num_in)
    tensors = {
        "weight": torch.randint(-128, 128, (num_out, num_in), generator=generator).to(torch.int8),
        "weight_scale": torch.rand(num_out, 1, generator=generator) / 100 + 1e-3,
    }
    if bias:
        tensors["bias"] = torch.randn(num_out, generator=generator).half()
    return PackedWeight(
        layer="blocks.0.mlp.fc2",
        quant=LayerQuant(format="int8_tensorwise", convrot_group=group),
        shape=(num_out, num_in),
        tensors=tensors,
    )


def whole_numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: their rotation is exact in every dtype, so only the rule can differ."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def reference(weight: PackedWeight, x_MK: Tensor) -> np.ndarray:
    """Contract 8.6 in numpy: rotate, round half to even per row, int64 products, one fp32 scale."""
    kind = {torch.float32: np.float32, torch.float16: np.float16}[x_MK.dtype]
    x = x_MK.numpy().astype(np.float64)
    group = weight.quant.convrot_group
    if group:
        h4 = np.ones((4, 4)) - 2 * np.fliplr(np.eye(4))
        h = h4
        while len(h) < group:
            h = np.kron(h, h4)
        x = (x.reshape(len(x), -1, group) @ h / group**0.5).reshape(x.shape)
    x = x.astype(kind)
    scale = (np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(127)).clip(1e-30)
    codes = np.rint(x / scale.astype(kind)).clip(-128, 127).astype(np.int64)
    products = codes @ weight.tensors["weight"].numpy().astype(np.int64).T
    weight_scale = weight.tensors["weight_scale"].numpy().reshape(1, -1)
    y = (products.astype(np.float32) * (scale * weight_scale)).astype(kind)
    return y + weight.tensors["bias"].numpy().astype(kind) if "bias" in weight.tensors else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_out", "num_in", "group"), [(24, 128, 64), (40, 512, 256), (16, 48, 16), (8, 40, 0)]
)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_the_linear_is_the_written_rule(
    num_out: int, num_in: int, group: int, rows: int, dtype: torch.dtype
) -> None:
    weight = packed(num_out, num_in, group=group)
    x = whole_numbers(rows, num_in, dtype=dtype)
    y = Int8ConvRotLinear(weight)(x)
    assert y.dtype == dtype
    assert np.array_equal(y.numpy(), reference(weight, x))


def test_one_scale_for_the_whole_weight_is_allowed() -> None:
    weight = packed(8, 64, group=16, bias=False)
    weight.tensors["weight_scale"] = torch.tensor(0.01)  # type: ignore[index]
    x = whole_numbers(3, 64, dtype=torch.float32)
    assert np.array_equal(Int8ConvRotLinear(weight)(x).numpy(), reference(weight, x))


@pytest.mark.parametrize("num_in", [8, 1024, 1033, 4095])
def test_products_are_exact_at_the_extremes(num_in: int) -> None:
    for a, b in ((-128, -128), (127, -128), (127, 127)):
        x = torch.full((3, num_in), a, dtype=torch.int8)
        weight = torch.full((8, num_in), b, dtype=torch.int8)
        assert torch.equal(
            multiply(x, weight), torch.full((3, 8), a * b * num_in, dtype=torch.int32)
        )


def test_products_of_random_operands_are_those_of_int64() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-128, 128, (7, 3000), generator=generator).to(torch.int8)
    weight = torch.randint(-128, 128, (16, 3000), generator=generator).to(torch.int8)
    assert torch.equal(multiply(x, weight).long(), x.long() @ weight.long().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_zero_row_gives_the_bias(dtype: torch.dtype) -> None:
    weight = packed(24, 64, group=64)
    y = Int8ConvRotLinear(weight)(torch.zeros(2, 64, dtype=dtype))
    assert torch.equal(y, weight.tensors["bias"].to(dtype).expand(2, -1))


@pytest.mark.parametrize("group", [4, 16, 64, 256])
def test_the_rotation_is_orthogonal_and_its_own_inverse(group: int) -> None:
    h = hadamard(group, torch.float64, CPU)
    assert torch.allclose(h @ h, torch.eye(group, dtype=torch.float64), atol=1e-12)
    assert torch.equal(h, h.t())
    x = torch.randn(3, 2 * group, dtype=torch.float64)
    assert torch.allclose(rotate(rotate(x, group), group), x, atol=1e-12)


def test_a_rotated_weight_gives_the_unrotated_product() -> None:
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(32, 256, generator=generator)
    turned = rotate(plain, 64)  # H is symmetric: W @ H.T
    scale = turned.abs().amax(dim=1, keepdim=True) / 127
    weight = PackedWeight(
        layer="layer",
        quant=LayerQuant(format="int8_tensorwise", convrot_group=64),
        shape=(32, 256),
        tensors={"weight": (turned / scale).round().to(torch.int8), "weight_scale": scale},
    )
    x = torch.randn(9, 256, generator=generator)
    want = F.linear(x, plain)
    assert (Int8ConvRotLinear(weight)(x) - want).norm() / want.norm() < 0.02


def test_leading_axes_are_kept() -> None:
    linear = Int8ConvRotLinear(packed(24, 64, group=16))
    x = whole_numbers(2, 3, 64, dtype=torch.float32)
    assert torch.equal(linear(x).flatten(0, 1), linear(x.flatten(0, 1)))


def test_many_rows_are_scaled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Int8ConvRotLinear(packed(24, 64, group=16))
    x = whole_numbers(11, 64, dtype=torch.float16)
    whole = linear(x)
    monkeypatch.setattr(module, "_MAX_ACCUMULATORS", 24 * 4)
    assert torch.equal(linear(x), whole)


def test_the_backend_is_registered_and_names_its_route() -> None:
    assert "int8_convrot" in BACKENDS
    backend = linear_backend("int8_convrot")
    assert backend.formats == ("int8_tensorwise",)
    assert backend.reason(CPU) == ""
    assert "exact float32 blocks" in backend.route(CPU)
    assert "_int_mm" in backend.route(torch.device("cuda"))


@pytest.mark.parametrize("group", [0, 16])
def test_the_exact_backend_of_int8_layers_rounds_no_activation(group: int) -> None:
    weight = packed(24, 64, group=group)
    x = torch.randn(11, 64, generator=torch.Generator().manual_seed(1))
    exact = linear_backend("int8_dequant").build(weight)(x)
    wide = weight.tensors["weight"].double() * weight.tensors["weight_scale"].double()
    rows = rotate(x.double(), group) if group else x.double()
    want = rows @ wide.T + weight.tensors["bias"].double()
    assert float((exact - want).norm() / want.norm()) < 1e-6
    lossy = Int8ConvRotLinear(weight)(x)
    assert 1e-3 < float((lossy - want).norm() / want.norm()) < 5e-2
