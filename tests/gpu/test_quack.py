"""QuACK's GEMM against torch's, and its SwiGLU against Triton's step: the same bits."""

from __future__ import annotations

import pytest
import torch

from runtime.checkpoints.base import PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.load import load_denoiser
from runtime.kernels.elementwise import load
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.quack import CAPABILITY, QuackLinear, reference
from tests.denoiser_parts import conditioning, demo_plan, first_block
from tests.gpu.linear_times import LAYERS, layer
from tests.gpu.test_graphs import tiny, velocity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the compiler, about the package
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1021, 9984, 10047, 10110, 20094)  # from about a thousand on cuBLAS does not cut K


@pytest.fixture(autouse=True)
def runs_here() -> None:
    torch.manual_seed(2)
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("its tiles are for Hopper")
    assert not (reason := linear_backend("quack").reason(CUDA)), reason


def linear(features: int, width: int) -> tuple[QuackLinear, PackedWeight]:
    weight = (torch.randn(features, width, device=CUDA) * 0.02).to(BF16)
    packed = layer(weight)
    return QuackLinear(packed), packed


@pytest.mark.parametrize("name", LAYERS)
def test_products_have_the_bits_of_torch(name: str) -> None:
    width, features = LAYERS[name]
    module, packed = linear(features, width)
    for rows in ROWS:
        x = torch.randn(rows, width, device=CUDA).to(BF16)
        with torch.inference_mode():
            assert torch.equal(module(x), reference(packed, x)), rows


@pytest.mark.parametrize("rows", [1, 2, 17, 255, 257])
def test_few_rows_are_rounded_sums(rows: int) -> None:
    """Half a bf16 ulp, and an fp32 rounding of a partial sum for each of K additions."""
    module, packed = linear(5376, 7168)
    x = torch.randn(rows, 7168, device=CUDA).to(BF16)
    weight = packed.tensors["weight"].double()
    exact = x.double() @ weight.t()
    summed = x.double().abs() @ weight.abs().t() * 7168 * 2**-24
    with torch.inference_mode():
        got = module(x)
    assert got.shape == (rows, 5376)
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + summed).all()


@pytest.mark.parametrize("rows", [1, 17, 257, 10047])
def test_swiglu_has_the_bits_of_the_product_and_the_step(rows: int) -> None:
    module, _ = linear(28672, 5376)
    swiglu = load("triton", CUDA).swiglu
    x = torch.randn(1, rows, 5376, device=CUDA).to(BF16) * 3  # silu from 0 to its whole argument
    with torch.inference_mode():
        want = swiglu(module(x[0]))
        module.gated = True
        got = module(x)
    assert got.shape == (1, rows, 14336) and torch.equal(got[0], want)


def test_a_block_computes_the_same_with_and_without() -> None:
    """At the demo's sizes the products of a block, SwiGLU in the first of them."""
    plan = demo_plan(device="cuda", dtype="bf16", elementwise="triton", dense="quack")
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    model, _ = load_denoiser(checkpoint, plan, CUDA)
    block = model.blocks[0]
    fc1 = block.mlp.fc1  # type: ignore[union-attr]
    assert isinstance(fc1, QuackLinear) and fc1.gated
    x = torch.randn(77, 128, device=CUDA).to(BF16)
    fused = first_block(model, x)
    fc1.gated = False
    block.mlp.ops = load("triton", CUDA)  # type: ignore[union-attr]
    assert torch.equal(fused, first_block(model, x))
    dense, _ = load_denoiser(checkpoint, demo_plan(device="cuda", dtype="bf16"), CUDA)
    error = (fused.float() - first_block(dense, x).float()).norm()
    assert error <= 2**-8 * fused.float().norm()


def test_a_graph_replays_its_bits() -> None:
    plain, model = (tiny(on, dense="quack", elementwise="triton") for on in (False, True))
    for sigma in (0.9, 0.6, 0.3):
        given = conditioning()
        assert torch.equal(velocity(model, given, sigma), velocity(plain, given, sigma))
