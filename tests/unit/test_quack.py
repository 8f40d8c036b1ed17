"""The quack backend on a CPU: what it refuses, and that the model hands it what it takes."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3 import linears
from runtime.h3.load import load_denoiser
from runtime.h3.model import Block
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.linear import linear_backend, linear_builder, quack
from runtime.kernels.linear.quack import WIDTHS, WIDTHS_OF_PAIRS, QuackLinear, width
from runtime.kernels.unavailable import Unavailable
from runtime.parallel.mesh import Mesh
from tests.denoiser_parts import demo_plan, denoiser, first_block
from tests.rank_processes import on_ranks
from tests.wide_denoiser import Case, model_of, sampled

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def packed(rows: int, columns: int, **more: Tensor) -> PackedWeight:
    return PackedWeight(
        layer="blocks.0.mlp.fc1",
        quant=LayerQuant(format=UNQUANTISED),
        shape=(rows, columns),
        tensors={"weight": torch.randn(rows, columns).to(BF16), **more},
    )


class Step(Eager):
    """Stands for Triton's steps, whose roundings are eager's."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels in torch, and no gate."""
    stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(
        product=F.linear, swiglu=lambda x, weight: Eager().swiglu(F.linear(x, weight))
    )
    monkeypatch.setitem(sys.modules, "runtime.kernels.linear.quack_kernels", kernels)
    ungated = quack.BACKEND.__class__(
        name="quack",
        formats=(UNQUANTISED,),
        build=QuackLinear,
        reason=lambda device: "",
        route=lambda device: "torch",
    )
    monkeypatch.setattr(quack, "BACKEND", ungated)
    monkeypatch.setattr(linears, "Triton", Step)
    monkeypatch.setattr("runtime.h3.load.load_elementwise", lambda name, device: Step())
    monkeypatch.setattr("runtime.h3.load.hand_over_rows", lambda model, ops: None)  # FP8's


def test_it_says_why_it_cannot_run() -> None:
    reason = linear_backend("quack").reason
    assert reason(CPU) == ("it needs a CUDA GPU of compute capability 9.0 (Hopper), got cpu")


@pytest.mark.parametrize("got", [(8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, got: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: got)
    reason = linear_backend("quack").reason(CUDA)
    assert reason.endswith(f"compute capability 9.0 (Hopper), this GPU has {got[0]}.{got[1]}")


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    reason = linear_backend("quack").reason(CUDA)
    assert reason == 'quack-kernels is not installed; pip install -e ".[quack]"'
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.5")
    monkeypatch.setitem(sys.modules, "runtime.kernels.linear.quack_kernels", None)
    reason = linear_backend("quack").reason(CUDA)
    assert reason.startswith("quack-kernels 0.6.5 cannot be imported (ModuleNotFoundError: ")


def test_a_plan_on_a_cpu_is_refused_before_anything_is_read() -> None:
    with pytest.raises(Unavailable, match=r"quack.*needs a CUDA GPU .* got cpu"):
        denoiser(dtype="bf16", dense="quack")


def test_a_plan_in_fp32_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be bf16 for quack on a GPU, got 'fp32'"):
        demo_plan(dense="quack", dtype="fp32", device="cuda")


def test_quantised_layers_are_not_its() -> None:
    layers = {"blocks.0.mlp.fc1": LayerQuant(format="nvfp4")}
    with pytest.raises(Unavailable, match=r"blocks\.0\.mlp\.fc1 is nvfp4, and it runs"):
        linear_builder({"nvfp4": "quack"}, layers, CPU)


def test_a_bias_is_refused() -> None:
    with pytest.raises(Unavailable, match=r"fc1 has a bias, which it does not add"):
        QuackLinear(packed(16, 16, bias=torch.zeros(16)))


@pytest.mark.parametrize("shape", [(20, 16), (16, 12)])
def test_odd_sizes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(Unavailable, match=f"is {shape[0]}x{shape[1]}, and both must be multiples"):
        QuackLinear(packed(*shape))


@pytest.mark.parametrize(
    ("rows", "features", "widths", "want"),
    [
        (10047, 21504, WIDTHS, 192),  # 34 rounds of 192 are 6528, 32 of 208 are 6656
        (10047, 5376, WIDTHS, 208),  # 9 of 192 are 1728, 8 of 208 are 1664
        (20094, 5376, WIDTHS, 192),
        (10047, 28672, WIDTHS, 208),
        (10047, 28672, WIDTHS_OF_PAIRS, 192),
        (1, 192, WIDTHS, 192),
    ],
)
def test_the_width_of_a_tile(rows: int, features: int, widths: tuple[int, ...], want: int) -> None:
    assert width(rows, features, 132, widths) == want


@pytest.mark.parametrize("memory", ["plain", "low"])
@pytest.mark.parametrize("form", ["pruned_bf16", "pruned_nvfp4"])
def test_the_model_keeps_its_bits(on_cpu: None, memory: str, form: str) -> None:
    """Every unquantised linear of the blocks, fc1 with SwiGLU, of a plan with it."""
    checkpoint = random_checkpoint("dit", size="tiny", format=form)
    plain, ours = (
        load_denoiser(checkpoint, demo_plan(dtype="bf16", dense=name, memory=memory), CPU)[0]
        for name in ("dense", "quack")
    )
    found = {name for name, module in ours.named_modules() if isinstance(module, QuackLinear)}
    assert found == linears.narrow_layers(plain) - checkpoint.layers.keys()
    x = torch.randn(77, plain.cfg.hidden).to(BF16)
    assert torch.equal(first_block(ours, x), first_block(plain, x))
    gated = isinstance(ours.blocks[0].mlp.fc1, QuackLinear)  # type: ignore[union-attr]
    told = linears.routes(ours, checkpoint.layers, demo_plan(dtype="bf16", dense="quack"), CPU)
    assert gated == ("swiglu" in told)
    assert "swiglu" not in linears.routes(plain, checkpoint.layers, demo_plan(dtype="bf16"), CPU)


def test_eager_steps_keep_their_swiglu(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.h3.load.load_elementwise", lambda name, device: Eager())
    first = denoiser(dtype="bf16", dense="quack").blocks[0]
    assert isinstance(first, Block) and isinstance(first.mlp.fc1, QuackLinear)
    assert not first.mlp.fc1.gated and isinstance(first.mlp.ops, Eager)


RANKS: dict[str, dict[str, object]] = {
    "TP2": {},
    "TP2xU2": {"overlap": "qkv"},
    "U2": {"memory": "low"},
}


def on_rank(mesh: Mesh, fields: dict[str, object]) -> list[dict[str, Tensor]]:
    """Velocities of a rank with dense and with quack, which has all that a rank multiplies."""
    stand_in(pytest.MonkeyPatch())  # of a process that ends after it
    found = []
    for name in ("dense", "quack"):
        case = Case(fields={"dtype": "bf16", "dense": name, **fields})
        model = model_of(case, mesh)
        count = sum(isinstance(module, QuackLinear) for module in model.modules())
        messages = 2 if "overlap" in fields else 1
        assert count == (model.cfg.num_layers * (3 + messages) if name == "quack" else 0)
        found.append(sampled(model, case))
    return found


@pytest.mark.parametrize("layout", RANKS)
def test_ranks_keep_their_bits(layout: str) -> None:
    """Cut weights, a QKV in turns and groups of rows, SwiGLU in the kernel of each rank's fc1."""
    for plain, ours in on_ranks(on_rank, layout, {"layout": layout, **RANKS[layout]}):
        assert plain.keys() == ours.keys() and plain
        assert all(torch.equal(plain[name], ours[name]) for name in plain)
