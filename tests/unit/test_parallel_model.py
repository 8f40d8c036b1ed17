"""The denoiser on gloo ranks against one process: every step, video and audio rows apart.

What does not come out bit-equal: a BLAS product over fewer rows may add its terms in another order.
On this CPU that is the last fp32 product (the heads of the final layer) whatever the plan, and
every product when the compute dtype is fp32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from comfy_kitchen.float_utils import from_blocked
from torch import Tensor, nn

from runtime.h3.model import Block
from runtime.kernels.linear.nvfp4_native import NVFP4NativeLinear, activation_scale, quantise
from runtime.kernels.unavailable import Unavailable
from runtime.meter import ALL_COMMUNICATION, ATTENTION, COMMUNICATION, GEMM, PARTS, Call, StepMeter
from runtime.parallel.mesh import ALONE, Mesh
from tests.denoiser_parts import demo_plan
from tests.rank_processes import on_ranks
from tests.wide_denoiser import HEADS, Case, model_of, sampled

LIMIT = 1e-6  # relative L2 of a step's velocities, of each stream
OUTLIER = 40.0
NATIVE = Case(stored="nvfp4", fields={"nvfp4": "nvfp4_native", "dtype": "bf16"}, outlier=OUTLIER)
CASES = {
    "fp32": Case(),
    "bf16": Case(fields={"dtype": "bf16"}),
    "nvfp4_native": NATIVE,
    "fp8_tensorwise": Case(fields={"dense": "fp8_tensorwise", "dtype": "bf16"}, outlier=OUTLIER),
}
MORE = {  # on two ranks
    "nvfp4_dequant": Case(stored="nvfp4", fields={"dtype": "bf16"}),
    "nvfp4_kitchen_fallback": replace(
        NATIVE, fields={"nvfp4": "nvfp4_kitchen_fallback", "dtype": "bf16"}
    ),
    "fp8_rowwise": Case(fields={"dense": "fp8_rowwise", "dtype": "bf16"}),
    "fp8_dequant": Case(stored="fp8", fields={"dtype": "bf16"}),
    "int8_convrot": Case(stored="int8", fields={"dtype": "bf16"}),
    "memory low": Case(fields={"memory": "low", "dtype": "bf16"}),
    "sdpa_math": Case(fields={"attention": "sdpa_math"}),
    "local": replace(NATIVE, fields={**NATIVE.fields, "amax": "local"}),
    "rows split": Case(fields={"dtype": "bf16", "row_split": "2:5"}),
    "nvfp4_native, rows split": replace(NATIVE, fields={**NATIVE.fields, "row_split": "2:5"}),
}
LAYOUTS = ("U2", "U4", "U6", "U7", "U8")
CUT = {"fp32": Case(), "nvfp4_dequant, fp32": Case(stored="nvfp4")}  # weights: bf16 sums differ

Codes = list[tuple[Tensor, Tensor]]  # by call: packed codes [R, K/2], block scales [R, K/16]


def codes_of(model: nn.Module) -> Codes:
    """Filled while the model runs: the integers that every NVFP4 layer of the blocks multiplies."""
    found: Codes = []

    def record(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, NVFP4NativeLinear)
        x_RK = args[0]
        scale = activation_scale(x_RK, layer.input_scale, layer.share_amax)
        codes, blocks = quantise(x_RK, scale)
        rows, columns = x_RK.shape
        plain = from_blocked(blocks.view(torch.uint8), rows, columns // 16)
        found.append((codes[:rows], plain.clone()))

    for layer in model.modules():
        if isinstance(layer, NVFP4NativeLinear):
            layer.register_forward_pre_hook(record)
    return found


@dataclass(frozen=True, kw_only=True)
class Seen:
    """On one rank. steps: by case, the velocities; codes and parts: of the case NATIVE."""

    steps: dict[str, dict[str, Tensor]]
    codes: Codes
    parts: dict[str, float]


def evaluated(mesh: Mesh, cases: dict[str, Case]) -> Seen:
    """Every case, and NATIVE once more with its integers and a meter."""
    steps = {name: sampled(model_of(case, mesh), case) for name, case in cases.items()}
    meter = StepMeter("cpu")
    model = model_of(NATIVE, mesh, meter)
    codes = codes_of(model)
    meter.open()
    sampled(model, NATIVE)
    return Seen(steps=steps, codes=codes, parts=meter.read(meter.close(), 1000.0))


@functools.cache
def on_layout(layout: str) -> list[Seen]:
    """On all its ranks: one start of the processes for all tests of a layout."""
    if layout.startswith("TP"):
        return on_ranks(evaluated, layout, CUT)
    return on_ranks(evaluated, layout, CASES | MORE if layout == "U2" else CASES)


@functools.cache
def alone(name: str) -> dict[str, Tensor]:
    """One process."""
    case = {**CASES, **MORE, **CUT}[name]
    return sampled(model_of(case, ALONE), case)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def velocities(of: dict[str, Tensor]) -> list[str]:
    names = [name for name in of if "/v_video" in name or "/v_audio" in name]
    assert len(names) == 6  # three steps, two streams
    return names


def check(layout: str, names: list[str], limit: float = LIMIT) -> None:
    ranks = on_layout(layout)
    for case in names:
        want = alone(case)
        for velocity in velocities(want):
            first = ranks[0].steps[case][velocity]
            assert all(torch.equal(rank.steps[case][velocity], first) for rank in ranks), case
            assert relative(first, want[velocity]) <= limit, (case, velocity)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_rows_compute_what_one_process_does(layout: str) -> None:
    check(layout, list(CASES))


def test_every_linear_backend_and_other_attention_run_on_two_ranks() -> None:
    check("U2", [name for name in MORE if name != "local"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_quantise_an_outlier_row_to_the_integers_of_one_process(layout: str) -> None:
    ranks, want = on_layout(layout), evaluated(ALONE, {}).codes
    assert len(want) == 3 * 2 * 4  # steps, blocks, linears
    for call, (codes, blocks) in enumerate(want):
        assert torch.equal(torch.cat([rank.codes[call][0] for rank in ranks]), codes), call
        assert torch.equal(torch.cat([rank.codes[call][1] for rank in ranks]), blocks), call


def test_with_local_amax_an_outlier_row_makes_a_difference() -> None:
    velocity = "step_00/net_pos/v_video"
    assert relative(on_layout("U2")[0].steps["local"][velocity], alone("local")[velocity]) > 1e-3


@pytest.mark.parametrize("layout", ["TP2", "TP2xU2"])
def test_ranks_that_share_weights_compute_what_one_process_does(layout: str) -> None:
    check(layout, list(CUT))


def test_the_waiting_for_other_ranks_is_measured_apart() -> None:
    for rank in on_layout("U2"):
        assert rank.parts[COMMUNICATION] > 0 and rank.parts[GEMM] > 0
        assert rank.parts[ATTENTION] > 0
        assert sum(rank.parts[part] for part in PARTS) == pytest.approx(1000.0)
        # No bound between the two: on the CPU a transfer ends in another thread, and whoever waits
        # for it also waits for a core to wake up on.
        assert 0 < rank.parts[ALL_COMMUNICATION] < 1000.0


def cut(mesh: Mesh, fitting: Case, refused: Case) -> tuple[int, int, str]:
    """Bytes of this rank's linears of the blocks, its heads, and why the other case is refused."""
    model = model_of(fitting, mesh)
    linears = (
        tensor
        for name, tensor in model.blocks.state_dict().items()
        if name.endswith("weight") and tensor.dim() == 2 and "adaln" not in name
    )
    with pytest.raises(Unavailable) as caught:
        model_of(refused, mesh)
    block = model.blocks[0]
    assert isinstance(block, Block)
    return sum(x.nbytes for x in linears), block.attn.heads, str(caught.value)


def test_two_ranks_that_share_weights_hold_half_each_and_refuse_what_cannot_be_halved() -> None:
    whole = sum(
        x.nbytes
        for name, x in model_of(CASES["bf16"], ALONE).blocks.state_dict().items()
        if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))
    )
    refused = Case(fields={"dense": "fp8_rowwise", "layout": "TP2"})
    for nbytes, heads, said in on_ranks(cut, "TP2", CASES["bf16"], refused):
        assert (2 * nbytes, 2 * heads) == (whole, HEADS)
        assert "layout TP2" in said and "choose a layout without TP, or another backend" in said


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cache", "easy_cache", "cache must be off with layout U2, got 'easy_cache'"),
        ("graphs", True, "graphs must be false with layout U2"),
        ("amax", "mine", "amax must be one of shared, local, got 'mine'"),
    ],
)
def test_a_plan_says_what_several_ranks_cannot_do(field: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        demo_plan(layout="U2", **{field: value})


def test_a_plan_of_several_ranks_is_not_run_by_one_in_silence() -> None:
    with pytest.raises(ValueError, match="has layout U2, and this runs on one rank; set layout"):
        model_of(Case(fields={"layout": "U2"}), ALONE)


def test_what_runs_inside_a_measured_call_counts_once() -> None:
    calls = [
        Call(COMMUNICATION, 1.0, 2.0),
        Call(COMMUNICATION, 3.0, 5.0),
        Call(GEMM, 0.0, 10.0, inside=2),
        Call(ATTENTION, 10.0, 11.0),
        Call(GEMM, 0.0, 12.0, inside=4),
    ]
    parts = StepMeter("cpu").read(calls, 20.0)
    assert parts[COMMUNICATION] == 3.0 and parts[ATTENTION] == 1.0
    assert parts[GEMM] == 7.0 + 1.0
