"""Messages between ranks: how many copies make them, and projection while they travel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.h3.load import exchanges
from runtime.h3.model import Block
from runtime.h3.overlap import QKVTurns
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.linear.fp8_dynamic import quantise_rows
from runtime.kernels.unavailable import Unavailable
from runtime.meter import ALL_COMMUNICATION, COMMUNICATION, StepMeter
from runtime.parallel.mesh import ALONE, Exchange, Group, Mesh
from runtime.parallel.shares import RowShares, head_shares, ranges
from runtime.parallel.turns import EDGES, HALVES, alone, counts_of, heads_of, pack, turns, unpack
from runtime.parallel.ulysses import Ulysses
from tests.denoiser_parts import demo_plan
from tests.rank_processes import on_ranks
from tests.wide_denoiser import HEADS, Case, model_of, sampled

NATIVE = Case(stored="nvfp4", fields={"nvfp4": "nvfp4_native", "dtype": "bf16"}, outlier=40.0)
CASES = {
    "fp32": Case(),
    "bf16": Case(fields={"dtype": "bf16"}),
    "sdpa_math": Case(fields={"attention": "sdpa_math", "dtype": "bf16"}),
    "nvfp4_native": NATIVE,
    "local amax": replace(NATIVE, fields={**NATIVE.fields, "amax": "local"}),
    "nvfp4_kitchen_fallback": replace(
        NATIVE, fields={"nvfp4": "nvfp4_kitchen_fallback", "dtype": "bf16"}
    ),
    "nvfp4_dequant": Case(stored="nvfp4", fields={"dtype": "bf16"}),
    "nvfp4 cached": Case(stored="nvfp4", fields={"dtype": "bf16", "weights": "cached"}),
    "fp8_rowwise": Case(fields={"dense": "fp8_rowwise", "dtype": "bf16"}),
    "fp8_dequant": Case(stored="fp8", fields={"dtype": "bf16"}),
    "int8_convrot": Case(stored="int8", fields={"dtype": "bf16"}),
}
CUT = {"fp32": Case(), "nvfp4_dequant": Case(stored="nvfp4")}


def overlapped(case: Case) -> Case:
    return replace(case, fields={**case.fields, "overlap": "qkv"})


Seen = dict[str, tuple[bool, int, dict[str, float]]]


def compared(mesh: Mesh, cases: dict[str, Case]) -> Seen:
    """By case: has every tensor of every step the bits of overlap off; reductions; times."""
    found = {}
    for name, case in cases.items():
        want = sampled(model_of(case, mesh), case)
        meter = StepMeter("cpu")
        model = model_of(overlapped(case), mesh, meter)
        cut = sum(isinstance(module, QKVTurns) for module in model.modules())
        assert cut == len(model.blocks)
        meter.open()
        got = sampled(model, case)
        parts = meter.read(meter.close(), 1000.0)
        same = got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
        found[name] = (same, cut, parts)
    return found


@pytest.mark.parametrize(("layout", "cases"), [("U2", CASES), ("U6", CASES), ("TP2xU2", CUT)])
def test_what_is_projected_while_others_travel_keeps_its_bits(
    layout: str, cases: dict[str, Case]
) -> None:
    names = ("bf16", "nvfp4_native") if layout == "U6" else tuple(cases)
    for rank in on_ranks(compared, layout, {name: cases[name] for name in names}):
        for name, (same, _, parts) in rank.items():
            assert same, (layout, name)
            assert parts[COMMUNICATION] > 0 and 0 < parts[ALL_COMMUNICATION] < 1000.0


def asked(mesh: Mesh, case: Case) -> tuple[int, int]:
    """How often ranks reduce anything in one run: with overlap and without."""
    calls = 0

    def counted(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return work(*args, **kwargs)

    counts = []
    with patch.object(dist, "all_reduce", partial(counted, dist.all_reduce)):
        for one in (overlapped(case), case):
            model = model_of(one, mesh)
            calls = 0
            sampled(model, one)
            counts.append(calls)
    return counts[0], counts[1]


def test_the_largest_activation_is_asked_for_once_for_all_messages() -> None:
    for more, plain in on_ranks(asked, "U2", NATIVE):
        assert more == plain == 3 * 2 * 4  # steps, blocks, linears


class Handed(Eager):
    """As Triton's steps before FP8 linears: what they make is handed on quantised row by row."""

    def norm_modulate(self, *operands: Any) -> Any:
        return quantise_rows(super().norm_modulate(*operands))

    def gated_add_norm(self, x: Tensor, o: Tensor, gate: Tensor, *rest: Any) -> Any:
        return self.norm_modulate(rest[0], self.gated_add(x, o, gate, rest[-1]), *rest[1:])

    def swiglu(self, gate_up: Tensor) -> Any:
        return quantise_rows(super().swiglu(gate_up))


def handed(mesh: Mesh, case: Case) -> bool:
    """Have FP8 rows from the step before the bits of rows that each linear quantises?"""
    want = sampled(model_of(case, mesh), case)
    model, ops = model_of(overlapped(case), mesh), Handed()
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.attn.qkv_proj, QKVTurns)
        assert block.attn.qkv_proj.takes_rows
        block.ops = block.mlp.ops = ops
    got = sampled(model, case)
    return all(torch.equal(got[name], want[name]) for name in want)


def test_rows_that_come_quantised_are_projected_in_turns_too() -> None:
    assert on_ranks(handed, "U2", CASES["fp8_rowwise"]) == [True, True]


def refused(mesh: Mesh) -> str:
    with pytest.raises(Unavailable) as caught:
        model_of(overlapped(Case(fields={"dense": "fp8_tensorwise", "dtype": "bf16"})), mesh)
    return str(caught.value)


def test_a_weight_that_is_scaled_whole_is_not_cut() -> None:
    for said in on_ranks(refused, "U2"):
        assert "overlap qkv" in said and "choose overlap off, or another backend" in said


def test_overlap_means_nothing_to_one_rank_and_memory_low_refuses_it() -> None:
    case = Case(fields={"dtype": "bf16"})
    model = model_of(overlapped(case), ALONE)
    assert not any(isinstance(module, QKVTurns) for module in model.modules())
    with pytest.raises(ValueError, match="overlap must be off with memory low, got 'qkv'"):
        demo_plan(overlap="qkv", memory="low", layout="U2")
    with pytest.raises(ValueError, match="overlap must be one of off, qkv, got 'all'"):
        demo_plan(overlap="all")


def test_a_record_tells_which_exchanges_are_at_work() -> None:
    pair = Group(size=2)
    rows, weights = (Mesh(evaluation=pair, **{name: pair}) for name in ("rows", "weights"))
    overlap, gather = demo_plan(overlap="qkv"), demo_plan(gather="packed_nvfp4")
    assert exchanges(overlap, rows) == ["overlap qkv"]
    assert exchanges(gather, rows) == ["gather packed_nvfp4"]
    assert exchanges(demo_plan(), rows) == []
    for plan in (overlap, gather):
        assert exchanges(plan, weights) == exchanges(plan, ALONE) == []


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("parts", [(1,), HALVES, EDGES, (1, 1, 1, 1, 1)])
def test_every_head_is_in_one_message_of_its_rank(ranks: int, parts: Sequence[int]) -> None:
    order = turns(HEADS, ranks, parts)
    whole = ranges(head_shares(HEADS, ranks))
    for rank in range(ranks):
        own = [heads_of(turn)[rank] for turn in order]
        assert [h for part in own for h in range(part.start, part.stop)] == list(
            range(whole[rank].start, whole[rank].stop)
        )
    for turn in order:
        assert counts_of(turn) == [part.stop - part.start for part in heads_of(turn)]
        assert len(turn) <= 2 and counts_of(alone(turn)) == counts_of(turn)
        assert len(alone(turn)) == len(set(counts_of(turn)))


@pytest.mark.parametrize(
    ("heads", "ranks", "sizes"),
    [
        (56, 2, [[5, 5], [18, 18], [5, 5]]),
        (56, 3, [[3, 3, 3], [13, 13, 12], [3, 3, 3]]),
        (56, 4, [[3] * 4, [9] * 4, [2] * 4]),
        (56, 6, [[5] * 6, [5, 5, 4, 4, 4, 4]]),  # less than two heads at the edges
        (4, 3, [[2, 1, 1]]),
    ],
)
def test_first_and_last_turn_are_small_where_there_are_heads_enough(
    heads: int, ranks: int, sizes: list[list[int]]
) -> None:
    assert [counts_of(turn) for turn in turns(heads, ranks, EDGES)] == sizes


@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_a_message_is_packed_and_unpacked_head_by_head(ranks: int) -> None:
    x = torch.arange(5 * 3 * HEADS * 2).view(5, 3, HEADS, 2)
    out = torch.zeros(5, HEADS, 2, dtype=x.dtype)
    for turn in turns(HEADS, ranks, EDGES):
        want = [x[:, :, heads].reshape(-1) for heads in heads_of(turn)]
        assert torch.equal(pack(x, turn), torch.cat(want))
        of_turn = torch.cat([x[:, :, heads] for heads in heads_of(turn)], dim=2)
        assert torch.equal(pack(of_turn, alone(turn)), torch.cat(want))
        unpack(torch.cat([x[:, 0, heads].reshape(-1) for heads in heads_of(turn)]), turn, out)
    assert torch.equal(out, x[:, 0])


class Loopback(Group):
    """Nothing is sent: what would have arrived is not told from anything else."""

    def exchange(
        self, sent_N: Tensor, to: Sequence[int], of: Sequence[int], place: int = 0
    ) -> Exchange:
        """Of the right length."""
        assert sum(to) == len(sent_N)
        return Exchange(sent_N.new_zeros(sum(of)), sent_N)


@functools.cache
def copies(ranks: int) -> int:
    """Copy kernels that torch's profiler sees in one attention, beside the exchange's own."""
    counts = (4,) * ranks
    group = Loopback(rank=0, size=ranks)
    ulysses = Ulysses(
        lambda q, k, v: v.new_zeros(1, q.shape[2], q.shape[1] * q.shape[3]),
        group,
        RowShares(counts),
        Exchange.wait,
    )
    qkv = torch.randn(4, 3 * HEADS * 8).chunk(3, dim=-1)
    views = [x.unflatten(-1, (HEADS, 8))[None].transpose(1, 2) for x in qkv]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        ulysses(*views)
    cloned = sum(e.count for e in seen.key_averages() if e.key == "aten::clone")
    return sum(e.count for e in seen.key_averages() if e.key == "aten::copy_") - cloned


def test_a_message_costs_one_copy_on_each_side_and_two_where_ranks_differ() -> None:
    messages = 2 * 2  # head groups, there and back
    assert copies(8) == copies(4) == copies(2) == messages
    assert copies(6) == 2 * messages  # two ranks with 10 heads, four with 9


def called(mesh: Mesh, case: Case) -> list[tuple[str, tuple[int, ...]]]:
    """What this rank asks of which ranks, in order, in one run."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def noted(work: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append((name, tuple(dist.get_process_group_ranks(kwargs["group"]))))
        return work(*args, **kwargs)

    model = model_of(case, mesh)
    with (
        patch.object(dist, "all_reduce", partial(noted, dist.all_reduce, "reduce")),
        patch.object(dist, "all_to_all_single", partial(noted, dist.all_to_all_single, "exchange")),
    ):
        sampled(model, case)
    return calls


def test_ranks_ask_each_other_in_one_order_whatever_the_group() -> None:
    """On a GPU all goes over one stream: another order on one rank would wait for ever."""
    ranks = on_ranks(called, "TP2xU2", overlapped(NATIVE))
    assert {group for rank in ranks for _, group in rank} == {
        (0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3),
    }  # fmt: skip
    for first, calls in enumerate(ranks):
        for second in range(first):
            shared = [
                [call for call in of_rank if {first, second} <= set(call[1])]
                for of_rank in (calls, ranks[second])
            ]
            assert shared[0] == shared[1] != []
    assert all([name for name, _ in calls] == [name for name, _ in ranks[0]] for calls in ranks)
