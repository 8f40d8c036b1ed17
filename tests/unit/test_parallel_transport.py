"""Rows and heads through the exchange and back, on gloo processes: every one arrives, unpadded."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.h3.load import load_denoiser
from runtime.layouts import Layout, check_heads, parts_of
from runtime.parallel.mesh import BACKSTOP, Exchange, Group, Mesh
from runtime.parallel.shares import RowShares, head_shares, ranges, row_shares, shares, unit_shares
from runtime.parallel.turns import HALVES
from runtime.parallel.ulysses import Ulysses
from tests.denoiser_parts import CPU, FILES, demo_plan
from tests.rank_processes import on_ranks

HEADS = 56
LENGTHS = (*range(1, 68), 1021, 20094, 20511)
RANKS = (2, 4, 6, 7, 8)


def numbered(num_rows: int) -> Tensor:
    """[S, 3, H, 1]: row, head and which of q, k, v, as one whole number; exact in float64."""
    rows = torch.arange(num_rows, dtype=torch.float64)[:, None, None, None]
    parts = torch.arange(3, dtype=torch.float64)[:, None, None]
    heads = torch.arange(HEADS, dtype=torch.float64)[:, None]
    return (rows * 3 + parts) * HEADS + heads


class Checked:
    """In place of attention: sees that it has all rows of this rank's heads; answers q + v."""

    def __init__(self, num_rows: int, mesh: Mesh) -> None:
        self.whole, self.heads = numbered(num_rows), 0
        self.first = ranges(head_shares(HEADS, mesh.rows.size))[mesh.rows.rank].start

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = self.first + self.heads
        self.heads += q.shape[1]
        for part, x in enumerate((q, k, v)):
            want = self.whole[:, part, start : self.first + self.heads]
            assert torch.equal(x[0].transpose(0, 1), want), (part, x.shape)
        return (q + v).transpose(1, 2).flatten(2)


def carried(mesh: Mesh, lengths: tuple[int, ...], parts: tuple[int, ...]) -> list[int]:
    """The lengths that came through whole; those with too few rows are refused on every rank."""
    passed = []
    for num_rows in lengths:
        if num_rows < mesh.rows.size:
            with pytest.raises(ValueError, match=f"{num_rows} packed rows, too few"):
                row_shares(num_rows, mesh.rows.size)
            continue
        counts = row_shares(num_rows, mesh.rows.size)
        checked, whole = Checked(num_rows, mesh), numbered(num_rows)
        ulysses = Ulysses(checked, mesh.rows, RowShares(counts), Exchange.wait, parts)
        own = whole[ranges(counts)[mesh.rows.rank]]
        got = ulysses(*(x[None].transpose(1, 2) for x in own.unbind(1)))
        assert checked.heads == head_shares(HEADS, mesh.rows.size)[mesh.rows.rank]
        want = (own[:, 0] + own[:, 2]).flatten(1)[None]
        assert torch.equal(got, want), num_rows
        assert got.is_contiguous()
        passed.append(num_rows)
    return passed


@pytest.mark.parametrize("ranks", RANKS)
def test_every_row_and_head_comes_through_the_exchange_and_back(ranks: int) -> None:
    want = [num_rows for num_rows in LENGTHS if num_rows >= ranks]
    assert on_ranks(carried, f"U{ranks}", LENGTHS, HALVES) == [want] * ranks


@pytest.mark.parametrize("parts", [(1,), (1, 1, 1, 1)])
def test_the_exchange_may_be_cut_into_any_number_of_messages(parts: tuple[int, ...]) -> None:
    assert on_ranks(carried, "U6", (6, 67, 1021), parts) == [[6, 67, 1021]] * 6


def test_shares_are_ragged_and_never_padded() -> None:
    assert head_shares(56, 6) == (10, 10, 9, 9, 9, 9)
    assert row_shares(20511, 2) == (10256, 10255)
    assert shares(7, 7) == (1,) * 7
    assert unit_shares(14336, 6, (128,)) == tuple(128 * n for n in (19, 19, 19, 19, 18, 18))
    for total in (1021, 20094):
        for parts in RANKS:
            assert sum(shares(total, parts)) == total


@pytest.mark.parametrize(
    ("total", "split", "counts"),
    [
        (20094, "9984:10110", (9984, 10110)),
        (20094, "0.4925:0.5075", (9896, 10198)),
        (20511, "1:1", (10256, 10255)),
        (67, "1:2:3:4:5:6", (3, 6, 10, 13, 16, 19)),  # of 3.19, 6.38, 9.57, 12.76, 15.95, 19.14
        (3, "1:1.4", (1, 2)),
    ],
)
def test_rows_are_split_in_proportion_to_the_last_one(
    total: int, split: str, counts: tuple[int, ...]
) -> None:
    found = row_shares(total, len(counts), parts_of(split))
    assert found == counts and sum(found) == total


def test_a_split_that_leaves_a_rank_without_rows_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"67 packed rows, and .* 1:1000 leaves none for rank 0"):
        row_shares(67, 2, parts_of("1:1000"))
    with pytest.raises(ValueError, match=r"row_split 0\.00001:1234567\.5 leaves none for rank 0"):
        row_shares(67, 2, parts_of("0.00001:1234567.5"))  # as it was given
    assert row_shares(67, 1, parts_of("1:1000")) == (67,)  # one rank has them all


@pytest.mark.parametrize(
    "split",
    [
        *("1", "1:", ":1", "1:0", "-1:2", "1:x", "1:1e9", "1;2", "1: 2", "1:2\n", "nan:1", "１:２"),
        ":".join(["1"] * 65),
        "1:2:" * 200_000 + "1",
        *(None, 0, 5, 1.5, True, [1, 2], ["1", "2"]),  # of a stored plan
    ],
)
def test_a_split_is_numbers_above_zero(split: object) -> None:
    match = "row_split must be numbers above 0, one for each rank"
    with pytest.raises(ValueError, match=match) as caught:
        demo_plan(layout="U2", row_split=split)
    assert len(str(caught.value)) < 300


def test_a_split_has_a_part_for_every_rank_that_shares_rows() -> None:
    for layout in ("U3", "TP2xU3", "CFG2xU3"):
        with pytest.raises(ValueError, match="row_split has 2 parts, 1:2, and layout"):
            demo_plan(layout=layout, row_split="1:2")
    for layout in ("U2", "TP4xU2", "TP2", "single"):
        assert demo_plan(layout=layout, row_split="1:2").row_split == "1:2"


def test_too_few_heads_or_units_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="4 heads here, too few for 6 ranks"):
        head_shares(4, 6)
    with pytest.raises(ValueError, match="192 features cannot be shared among 8 ranks"):
        unit_shares(192, 8, (128, 64))


@pytest.mark.parametrize(("layout", "heads"), [("U6", 5), ("TP2xU4", 7), ("CFG2xU4", 3)])
def test_a_layout_that_cannot_cut_the_heads_is_refused(layout: str, heads: int) -> None:
    asked = Layout.parse(layout)
    with pytest.raises(ValueError, match=f"has {heads} heads, too few for one each"):
        check_heads(asked, heads)
    check_heads(asked, heads + 1)


def test_heads_are_counted_before_a_weight_is_read() -> None:
    """The demo denoiser has four."""

    def read(done: int, total: int) -> None:
        raise AssertionError("a weight was read")

    checkpoint, plan = open_checkpoint(FILES.dit, "dit"), demo_plan(layout="U6")
    mesh = Mesh(rows=Group(size=6), everyone=Group(size=6))
    with pytest.raises(ValueError, match="layout U6 shares attention among 6 ranks"):
        load_denoiser(checkpoint, plan, CPU, read, mesh=mesh)


def limits(mesh: Mesh) -> list[timedelta]:
    """Of an exchange in each of this rank's groups that are a part of all ranks."""
    members = [group.members for group in (mesh.rows, mesh.sides, mesh.evaluation)]
    assert None not in members
    return [m._get_backend(CPU).options._timeout for m in members if m is not None]


def test_no_exchange_waits_longer_than_the_backstop() -> None:
    """torch's own limit of a part of all ranks is half an hour."""
    assert on_ranks(limits, "CFG2xU2") == [[BACKSTOP] * 3] * 4


def grouped(mesh: Mesh) -> list[float]:
    """What the groups of this rank sum up to, each rank giving its number."""
    mine = torch.tensor([float(mesh.everyone.rank)])
    groups = (mesh.rows, mesh.weights, mesh.everyone)
    return [float(group.total(mine.clone())) for group in groups]


def test_neighbours_share_weights_and_the_others_share_rows() -> None:
    got = on_ranks(grouped, "TP2xU2")
    assert got == [[2.0, 1.0, 6.0], [4.0, 1.0, 6.0], [2.0, 5.0, 6.0], [4.0, 5.0, 6.0]]
