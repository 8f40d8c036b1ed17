"""Plan field gather = packed_nvfp4 on gloo ranks: one process's integers and bits, fewer bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from comfy_kitchen.float_utils import from_blocked
from torch import Tensor

from runtime.h3.gathered import GatheredQKV, PackedOut
from runtime.h3.model import Block, H3Model
from runtime.kernels.linear.nvfp4_native import (
    NVFP4NativeLinear,
    NVFP4Rows,
    activation_scale,
    quantise,
)
from runtime.kernels.unavailable import Unavailable
from runtime.meter import COMMUNICATION, GEMM, StepMeter
from runtime.parallel import packed_rows
from runtime.parallel.mesh import ALONE, Mesh
from runtime.parallel.packed_rows import PackedGather, PackedReturn
from runtime.parallel.shares import RowShares, head_shares, ranges, row_shares
from runtime.parallel.tensor import PartialSum
from tests.denoiser_parts import demo_plan, normal
from tests.rank_processes import on_ranks
from tests.wide_denoiser import DIMS, HEADS, Case, model_of, sampled

NATIVE = {"nvfp4": "nvfp4_native", "dtype": "bf16"}
LENGTHS = (4, 5, 16, 31, 127, 128, 129, 260, 1021)
WIDTHS = (16, 48, 64, 128, 40)  # of which 48 ends within a tile of scales, 40 within a block
LAYOUTS = ("U2", "U4", "U6")
ROWS = 84  # of a request of tests/wide_denoiser.py
EVALUATIONS = 3
LIMIT = 1e-6  # of two fp32 sums in another order, before they are rounded

Operands = list[tuple[Tensor, Tensor]]  # by call of a block's linear: codes and their scales


def case(layout: str, gather: str = "packed_nvfp4") -> Case:
    """A reference row dwarfs all others: a scale of a rank's own rows would be seen."""
    fields: dict[str, object] = {**NATIVE, "layout": layout, "gather": gather}
    return Case(stored="nvfp4", fields=fields, outlier=40.0)


def rows_of(x_SK: Tensor, scale: Tensor) -> NVFP4Rows:
    return NVFP4Rows(*quantise(x_SK, scale), scale, len(x_SK), x_SK.dtype)


def same_operand(got: NVFP4Rows, want: NVFP4Rows, case: tuple[int, int]) -> None:
    """To the last bit of codes and scales, their padding included."""
    assert torch.equal(got.codes, want.codes), case
    assert got.blocks.dtype == want.blocks.dtype and got.blocks.shape == want.blocks.shape
    assert torch.equal(got.blocks.view(torch.uint8), want.blocks.view(torch.uint8))
    assert (got.num_rows, got.dtype) == (want.num_rows, want.dtype)
    assert got.codes.is_contiguous() and got.blocks.is_contiguous()


def carried(mesh: Mesh, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sizes of which every rank got one process's operand, its padding included."""
    passed = []
    for num_rows, width in sizes:
        x_SK = normal(num_rows, width)
        scale = activation_scale(x_SK, None)
        counts = row_shares(num_rows, mesh.rows.size)
        own = x_SK[ranges(counts)[mesh.rows.rank]]
        got = PackedGather(mesh.rows, RowShares(counts))(rows_of(own, scale))
        want = rows_of(x_SK, scale)
        same_operand(got, want, (num_rows, width))
        passed.append((num_rows, width))
    return passed


@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_rows_of_all_ranks_are_one_operand_tiles_and_all(ranks: int) -> None:
    sizes = [(rows, width) for rows in LENGTHS for width in WIDTHS]
    assert on_ranks(carried, f"U{ranks}", sizes) == [sizes] * ranks


def returned(mesh: Mesh, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sizes of which every rank got its rows of one process's operand; width: of a head."""
    passed = []
    for num_rows, width in sizes:
        heads = head_shares(7, mesh.rows.size)
        x_SK = normal(num_rows, 7 * width)
        scale = activation_scale(x_SK, None)
        counts = row_shares(num_rows, mesh.rows.size)
        widths = [count * width for count in heads]
        columns = x_SK[:, ranges(widths)[mesh.rows.rank]].contiguous()
        got = PackedReturn(mesh.rows, RowShares(counts))(rows_of(columns, scale), widths)
        want = rows_of(x_SK[ranges(counts)[mesh.rows.rank]], scale)
        same_operand(got, want, (num_rows, width))
        passed.append((num_rows, width))
    return passed


@pytest.mark.parametrize("ranks", [2, 4])
def test_packed_heads_of_all_rows_are_the_own_rows_of_one_operand(ranks: int) -> None:
    """Seven heads: uneven shares, and a rank's tiles of scales begin within another's."""
    sizes = [(rows, width) for rows in LENGTHS for width in (16, 32, 128)]
    assert on_ranks(returned, f"U{ranks}", sizes) == [sizes] * ranks


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one rank. sent: bytes to others in one exchange of the kind, by dtype, in order."""

    steps: dict[str, Tensor]
    operands: Operands
    outputs: Operands
    sent: list[tuple[str, int]]
    parts: dict[str, float]
    qkv_bytes: int


def evaluated(mesh: Mesh, of: Case) -> Seen:
    """All steps, with a meter, and with what QKV multiplies and what goes to other ranks."""
    meter = StepMeter("cpu")
    model = model_of(of, mesh, meter)
    operands, outputs = recorded(model, "qkv_proj"), recorded(model, "out_proj")
    with counted() as sent:
        meter.open()
        steps = sampled(model, of)
    parts = meter.read(meter.close(), 1000.0)
    weights = [
        tensor.nbytes
        for name, tensor in model.blocks.state_dict().items()
        if "qkv_proj" in name and name.endswith(".weight")
    ]
    return Seen(
        steps=steps,
        operands=operands,
        outputs=outputs,
        sent=sent,
        parts=parts,
        qkv_bytes=sum(weights),
    )


def recorded(model: H3Model, name: str) -> Operands:
    """Filled while the model runs: row by row, as tiles of a rank end with its rows."""
    found: Operands = []

    def seen(rows: NVFP4Rows) -> NVFP4Rows:
        number = rows.num_rows
        blocks = rows.blocks.view(torch.uint8)
        scales = from_blocked(blocks, number, rows.codes.shape[1] * 2 // 16)
        found.append((rows.codes[:number].clone(), scales.clone()))
        return rows

    def before(multiply: Callable[[NVFP4Rows], Tensor]) -> Callable[[NVFP4Rows], Tensor]:
        return lambda rows: multiply(seen(rows))

    for block in model.blocks:
        assert isinstance(block, Block)
        linear = getattr(block.attn, name)
        while isinstance(linear, GatheredQKV | PackedOut | PartialSum):
            linear = linear.linear
        assert isinstance(linear, NVFP4NativeLinear)
        linear.multiplied = before(linear.multiplied)  # type: ignore[assignment,method-assign]
    return found


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """(dtype, bytes) of every message to other ranks meanwhile."""
    found: list[tuple[str, int]] = []
    real = dist.all_to_all_single

    def exchange(received: Tensor, sent: Tensor, of: Any, to: list[int], **how: Any) -> Any:
        others = sum(to) - to[dist.get_rank(how["group"])]
        found.append((str(sent.dtype), others * sent.itemsize))
        return real(received, sent, of, to, **how)

    with patch.object(dist, "all_to_all_single", exchange):
        yield found


@functools.cache
def alone() -> Seen:
    """One process."""
    return evaluated(ALONE, case("single"))


@functools.cache
def on_layout(layout: str, gather: str) -> list[Seen]:
    return on_ranks(evaluated, layout, case(layout, gather))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_multiplies_one_processs_integers(layout: str) -> None:
    want = alone().operands
    assert len(want) == EVALUATIONS * DIMS.blocks
    for rank, seen in enumerate(on_layout(layout, "packed_nvfp4")):
        for call, (got, expected) in enumerate(zip(seen.operands, want, strict=True)):
            for pair in zip(got, expected, strict=True):
                assert torch.equal(*pair), (rank, call, int((pair[0] != pair[1]).sum()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_proj_gets_one_processs_integers_of_the_own_rows(layout: str) -> None:
    want = alone().outputs
    assert len(want) == EVALUATIONS * DIMS.blocks
    ranks = on_layout(layout, "packed_nvfp4")
    mine = ranges(row_shares(ROWS, len(ranks)))
    for rank, seen in enumerate(ranks):
        for call, (got, expected) in enumerate(zip(seen.outputs, want, strict=True)):
            for own, whole in zip(got, expected, strict=True):
                assert torch.equal(own, whole[mine[rank]]), (rank, call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_one_processs(layout: str) -> None:
    ranks = on_layout(layout, "packed_nvfp4")
    for name, want in alone().steps.items():
        assert all(torch.equal(rank.steps[name], ranks[0].steps[name]) for rank in ranks)
        assert relative(ranks[0].steps[name], want) <= LIMIT, name


def test_with_shared_weights_it_is_what_ranks_that_send_heads_compute() -> None:
    packed, heads = (on_layout("TP2xU2", gather) for gather in ("packed_nvfp4", "heads"))
    for name, want in heads[0].steps.items():
        assert relative(packed[0].steps[name], want) <= LIMIT, name


def test_packed_rows_are_fewer_bytes_than_the_heads() -> None:
    """As the formulas say, there and back."""
    inner = HEADS * DIMS.head_dim
    for layout in ("U2", "U4"):
        ranks = int(layout[1:])
        shares = zip(row_shares(ROWS, ranks), head_shares(HEADS, ranks), strict=True)
        for rank, (rows, heads) in enumerate(shares):
            there = inner - heads * DIMS.head_dim  # values of others' heads
            calls = EVALUATIONS * DIMS.blocks
            qkv = calls * 2 * rows * 3 * there
            away = (ROWS - rows) * heads * DIMS.head_dim
            packed = calls * ((ranks - 1) * rows * DIMS.hidden + away) * 9 // 16
            back = calls * 2 * away
            got = {g: on_layout(layout, g)[rank].sent for g in ("packed_nvfp4", "heads")}
            assert total(got["heads"], "torch.bfloat16") == qkv + back
            assert total(got["heads"], "torch.uint8") == 0
            assert total(got["packed_nvfp4"], "torch.uint8") == packed
            assert total(got["packed_nvfp4"], "torch.bfloat16") == 0
            assert packed < (qkv + back) / 3


def total(sent: list[tuple[str, int]], dtype: str) -> int:
    return sum(count for name, count in sent if name == dtype)


def test_the_table_of_bytes_is_computed() -> None:
    """H3's, with 20,511 rows, of the rank with the most."""
    hidden, heads, width = 5376, 56, 128
    for ranks in (2, 4, 8):
        rows = row_shares(20_511, ranks)[0]
        there = heads - head_shares(heads, ranks)[0]
        qkv = 2 * rows * 3 * there * width / 1e6
        packed = (ranks - 1) * rows * hidden * 9 / 16 / 1e6
        back = (20_511 - rows) * (heads - there) * width
        told = [qkv, packed, 2 * back / 1e6, back * 9 / 16 / 1e6]
        line = " | ".join(f"{count:.1f}" for count in told)
        assert f"| {ranks} | {line} |" in (packed_rows.__doc__ or "")


def test_a_rank_holds_the_weights_of_its_heads_and_its_waiting_is_measured() -> None:
    for layout in LAYOUTS:
        ranks = on_layout(layout, "packed_nvfp4")
        assert sum(rank.qkv_bytes for rank in ranks) == alone().qkv_bytes
        assert all(rank.parts[COMMUNICATION] > 0 and rank.parts[GEMM] > 0 for rank in ranks)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nvfp4": "nvfp4_dequant"}, "nvfp4 must be nvfp4_native with gather packed_nvfp4"),
        ({"amax": "local"}, "amax must be shared with gather packed_nvfp4 and layout U2, got 'loc"),
        ({"overlap": "qkv"}, "overlap must be off with gather packed_nvfp4"),
        ({"memory": "low"}, "memory must be plain with gather packed_nvfp4"),
    ],
)
def test_a_plan_says_what_does_not_go_with_it(fields: dict[str, object], said: str) -> None:
    plan = {**NATIVE, "gather": "packed_nvfp4", "layout": "U2"} | fields
    with pytest.raises(ValueError, match=said):
        demo_plan(**plan)
    demo_plan(**(plan | {"layout": "single"}))  # where nothing travels nothing is asked for


def refused(mesh: Mesh, of: Case) -> str:
    with pytest.raises(Unavailable) as caught:
        model_of(of, mesh)
    return str(caught.value)


@pytest.mark.parametrize("stored", ["bf16", "fp8", "int8"])
def test_rows_that_are_not_packed_anyway_are_refused(stored: str) -> None:
    for said in on_ranks(refused, "U2", replace(case("U2"), stored=stored)):
        assert "gather packed_nvfp4" in said and "blocks.0.attn.out_proj is stored as" in said
        assert said.endswith("choose gather heads")
