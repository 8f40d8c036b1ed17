"""FP8 linears on a GPU: Triton's codes are torch's bit for bit, and products are the codes'.

A product is compared with the float64 product of the same codes. bf16 rounds it by 1.7e-3 (relative
L2) and use_fast_accum adds less than that; a scale of the wrong row or a lost one gives 3e-2 and
more. The limit is 5e-3.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.fp8_dynamic import FP8DynamicLinear, quantise_rows, quantise_tensor
from runtime.kernels.linear.nvfp4_native import activation_scale, quantise
from runtime.kernels.unavailable import Unavailable

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
NAMES = ("fp8_rowwise", "fp8_tensorwise")
EAGER = {"fp8_rowwise": quantise_rows, "fp8_tensorwise": quantise_tensor}
LIMIT = 5e-3
WIDTHS = (5376, 7168, 14336)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def rows(count: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of very different sizes, one of them zero."""
    x = torch.randn(count, width, device=CUDA) * torch.logspace(-6, 4, count, device=CUDA)[:, None]
    x[count // 2] = 0
    return x.to(dtype)


def layer(width: int, features: int, *, bias: bool = False) -> PackedWeight:
    tensors = {"weight": (torch.randn(features, width, device=CUDA) * 0.02).to(BF16)}
    if bias:
        tensors["bias"] = torch.randn(features, device=CUDA).to(BF16)
    quant = LayerQuant(format=UNQUANTISED)
    return PackedWeight(layer="x", quant=quant, shape=(features, width), tensors=tensors)


def built(name: str, packed: PackedWeight) -> FP8DynamicLinear:
    backend = linear_backend(name)
    if reason := backend.reason(CUDA):
        pytest.skip(reason)
    module = backend.build(packed)
    assert isinstance(module, FP8DynamicLinear)
    return module


def of_codes(module: FP8DynamicLinear, name: str, x: Tensor) -> Tensor:
    codes, scale = EAGER[name](x)
    acc = codes.double() @ module.weight.double().t()
    y = acc * (scale.double() * module.weight_scale.double())
    return y if module.bias is None else y + module.bias.double()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 17, 1021])
def test_triton_quantises_with_torchs_bits(
    name: str, count: int, width: int, dtype: torch.dtype
) -> None:
    x = rows(count, width, dtype)
    got = built(name, layer(64, 64)).quantise(x)
    for want in (EAGER[name](x), EAGER[name](x.cpu())):
        assert torch.equal(got.scale.cpu(), want.scale.cpu())
        assert torch.equal(got.codes.view(torch.uint8).cpu(), want.codes.view(torch.uint8).cpu())


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_a_gap_between_them_and_rows_past_the_int32_range(name: str) -> None:
    quantise_x = built(name, layer(64, 64)).quantise
    wide = rows(33, 2 * 5376)
    got, want = quantise_x(wide[:, :5376]), EAGER[name](wide[:, :5376])
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    many = torch.ones(2**31 // 14336 + 7, 14336, device=CUDA, dtype=BF16)
    many[-1] = torch.randn(14336, device=CUDA).to(BF16)
    many[0, 0] = 7
    got = quantise_x(many)
    want = EAGER[name](many[[0, -1]])  # they hold the largest value of all
    assert torch.equal(got.codes[-1].view(torch.uint8), want.codes[-1].view(torch.uint8))
    assert torch.equal(got.scale.flatten()[-1], want.scale.flatten()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_does_not_disappear(name: str) -> None:
    for value in (float("nan"), float("inf")):
        x = rows(4, 5376)
        x[3, 7] = value
        assert not torch.isfinite(built(name, layer(5376, 64))(x)[3]).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5376, 21504), (7168, 5376), (5376, 28672), (14336, 5376)])
@pytest.mark.parametrize("count", [1, 17, 1021])
def test_a_product_is_that_of_its_codes(
    name: str, count: int, shape: tuple[int, int], bias: bool
) -> None:
    module = built(name, layer(*shape, bias=bias))
    x = torch.randn(count, shape[0], device=CUDA).to(BF16)
    got, want = module(x), of_codes(module, name, x)
    assert got.shape == (count, shape[1]) and got.dtype == BF16
    assert (got.double() - want).norm() <= LIMIT * want.norm()


def test_each_row_and_each_feature_has_its_own_scale() -> None:
    packed = layer(5376, 256)
    packed.tensors["weight"].mul_(torch.logspace(-3, 3, 256, device=CUDA)[:, None].to(BF16))
    module, x = built("fp8_rowwise", packed), rows(65, 5376)
    got, want = module(x).double(), of_codes(module, "fp8_rowwise", x)
    for line, exact in ((got, want), (got.t(), want.t())):
        error = (line - exact).norm(dim=1)
        assert bool((error <= LIMIT * exact.norm(dim=1)).all())


@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_and_fp8_layers_keep_the_codes_that_the_cpu_makes(name: str) -> None:
    weight = torch.randn(96, 64)
    scale = activation_scale(weight, None)
    codes, blocks = quantise(weight, scale)
    stored = {
        "nvfp4": {"weight": codes, "weight_scale": blocks, "weight_scale_2": scale},
        "float8_e4m3fn": {
            "weight": (weight * 100).to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor(0.01),
        },
    }
    for format, tensors in stored.items():
        made = [
            linear_backend(name).build(
                PackedWeight(
                    layer="x",
                    quant=LayerQuant(format=format),
                    shape=(96, 64),
                    tensors={key: tensor.to(device) for key, tensor in tensors.items()},
                )
            )
            for device in ("cpu", "cuda")
        ]
        on_cpu, on_gpu = (m.weight.view(torch.uint8).cpu() for m in made)  # type: ignore[operator]
        assert torch.equal(on_cpu, on_gpu)
        x = torch.randn(21, 64).to(BF16)
        want, got = made[0](x).double(), made[1](x.to(CUDA)).cpu().double()
        assert (got - want).norm() <= LIMIT * want.norm()


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_the_tensor_cores_cannot_take_is_refused(name: str) -> None:
    with pytest.raises(Unavailable, match="layer x is 40x64, and both must be multiples of 16"):
        linear_backend(name).build(layer(64, 40))
