"""Plan field transport = copy_engine on CPU ranks: the windows are files that all of them map.

What it needs of a GPU is `SymmetricWindow` alone; tests/gpu/test_parallel_gpu.py runs that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.h3.load import exchanges
from runtime.h3.parallelize import window_bytes
from runtime.kernels.unavailable import Unavailable
from runtime.layouts import Layout
from runtime.messages import Plan
from runtime.parallel import copy_engine
from runtime.parallel.carriers import carrier_of
from runtime.parallel.copy_engine import MOST_WINDOWS, CopyEngine, Ends, by_copy_engine, lines
from runtime.parallel.mesh import ALONE, Exchange, Group, Mesh
from runtime.parallel.shares import RowShares, ranges, row_shares
from runtime.parallel.turns import EDGES, HALVES, turns
from runtime.parallel.ulysses import Ulysses
from tests.denoiser_parts import demo_plan
from tests.rank_processes import on_ranks
from tests.unit.test_parallel_transport import LENGTHS, carried
from tests.wide_denoiser import HEADS, Case, model_of, sampled

CASES = {
    "bf16": Case(fields={"dtype": "bf16"}),
    "memory low": Case(fields={"dtype": "bf16", "memory": "low"}),
    "overlap": Case(fields={"dtype": "bf16", "overlap": "qkv"}),
    "rows split": Case(fields={"dtype": "bf16", "row_split": "2:5"}),
    "gather": Case(
        stored="nvfp4",
        fields={"nvfp4": "nvfp4_native", "dtype": "bf16", "gather": "packed_nvfp4"},
    ),
}


def in_bytes(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The first of it, as a window gives it."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


class Mapped:
    """A window of files, one for each member."""

    def __init__(self, folder: Path, number: int, group: Group, num_bytes: int) -> None:
        self._group = group
        own = self._path(folder, number, group.rank)
        with own.open("wb") as file:
            file.truncate(num_bytes)
        self.meet()
        self._bytes = [
            torch.from_file(
                str(self._path(folder, number, member)),
                shared=True,
                size=num_bytes,
                dtype=torch.uint8,
            )
            for member in range(group.size)
        ]
        self.meet()
        own.unlink()  # what is mapped stays

    @staticmethod
    def _path(folder: Path, number: int, member: int) -> Path:
        return folder / f"{number}.{member}"

    def of(self, member: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return in_bytes(self._bytes[member], shape, dtype)

    def meet(self) -> None:
        dist.barrier(self._group.members)


def copied_lines(into: Tensor, source: Tensor) -> None:
    """As copy_lines, of what a copy engine can copy."""
    lines(into).copy_(lines(source))


class Opened:
    """Windows, how many there have been, and their bytes."""

    def __init__(self, folder: Path, group: Group) -> None:
        self._folder, self._group, self.count, self.num_bytes = folder, group, 0, 0

    def __call__(self, num_bytes: int) -> Mapped:
        self.count += 1
        self.num_bytes += num_bytes
        return Mapped(self._folder, self.count, self._group, num_bytes)


def copied(mesh: Mesh, folder: str) -> tuple[Mesh, Opened]:
    """The mesh, whose rows go by windows."""
    rows = mesh.rows
    assert rows.members is not None
    place = Path(folder) / "-".join(map(str, dist.get_process_group_ranks(rows.members)))
    place.mkdir(exist_ok=True, parents=True)
    opened = Opened(place, rows)
    engine = CopyEngine(
        rows.rank,
        rows.size,
        agree=partial(copy_engine._gathered, rows.members, rows.size),
        open=opened,
        settled=lambda: None,
        copy=copied_lines,
    )
    return replace(mesh, rows=replace(rows, copies=engine)), opened


def carried_by_copies(
    mesh: Mesh, folder: str, lengths: tuple[int, ...], parts: tuple[int, ...]
) -> list[int]:
    return carried(copied(mesh, folder)[0], lengths, parts)


@pytest.mark.parametrize("ranks", [2, 4, 6, 7, 8])
def test_every_row_and_head_comes_through_the_windows_and_back(ranks: int, tmp_path: Path) -> None:
    lengths = (*LENGTHS[:20], 67, 1021, 20094) if ranks > 2 else LENGTHS
    want = [n for n in lengths if n >= ranks]
    found = on_ranks(carried_by_copies, f"U{ranks}", str(tmp_path), lengths, EDGES)
    assert found == [want] * ranks


def compared(mesh: Mesh, folder: str, cases: dict[str, Case]) -> dict[str, bool]:
    """By case: has every tensor of every step the bits of the collectives?"""
    found = {}
    for name, case in cases.items():
        want = sampled(model_of(case, mesh), case)
        windows, opened = copied(mesh, f"{folder}/{name}")
        model = model_of(case, windows)
        assert window_bytes(model) == 0
        got = sampled(model, case)
        assert 0 < opened.count <= MOST_WINDOWS and window_bytes(model) == opened.num_bytes
        found[name] = got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    return found


@pytest.mark.parametrize("layout", ["U2", "U6", "TP2xU2"])
def test_the_denoiser_has_the_bits_that_it_has_with_collectives(
    layout: str, tmp_path: Path
) -> None:
    names = ("bf16",) if layout == "TP2xU2" else tuple(CASES)
    if layout == "U6":
        names = tuple(name for name in names if name != "rows split")  # of two
    cases = {name: CASES[name] for name in names}
    ranks = Layout.parse(layout).ranks
    assert on_ranks(compared, layout, str(tmp_path), cases) == [dict.fromkeys(names, True)] * ranks


def reused(mesh: Mesh, folder: str) -> tuple[bool, int]:
    """Layer after layer in the same windows; what is done with is written over at once."""
    mesh, opened = copied(mesh, folder)
    counts = row_shares(101, mesh.rows.size)
    own = ranges(counts)[mesh.rows.rank]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = (q + k + v).transpose(1, 2).flatten(2)
        for x in (q, k, v):
            x.fill_(float("nan"))  # of this message alone
        return out

    same = True
    for parts in (EDGES, HALVES, EDGES):
        ulysses = Ulysses(attend, mesh.rows, RowShares(counts), Exchange.wait, parts)
        for turn in range(5):
            made = torch.Generator().manual_seed(turn)
            whole = torch.randn(101, 3, HEADS, 4, generator=made)
            got = ulysses(*(x[None].transpose(1, 2) for x in whole[own].clone().unbind(1)))
            q, k, v = whole[own].unbind(1)
            same &= torch.equal(got[0], (q + k + v).flatten(1))
    return same, opened.count


def test_windows_are_used_again_layer_by_layer(tmp_path: Path) -> None:
    # three there, though the first and the last are alike in size, and one for all back; then two
    assert on_ranks(reused, "U2", str(tmp_path)) == [(True, 3 + 1 + 2)] * 2


def test_what_is_sent_is_never_a_copy_that_nobody_holds() -> None:
    group = Group(size=2, members=object(), copies=object())  # type: ignore[arg-type]
    apart = torch.zeros(5, 3, HEADS, 8)[..., :4]  # heads that do not follow each other
    carrier = carrier_of(group, RowShares((5, 4)), Tensor.copy_)
    with pytest.raises(RuntimeError, match="view"):
        carrier.there(apart, turns(HEADS, 2, HALVES)[0], 0)


def evicted(mesh: Mesh, folder: str) -> tuple[bool, int]:
    """More sizes than there are windows, then the first again."""
    mesh, opened = copied(mesh, folder)
    rank, size = mesh.rows.rank, mesh.rows.size
    same = True
    for n in (*range(1, MOST_WINDOWS + 4), 1):
        sent = torch.arange(size * n) * (rank + 1)
        got = mesh.rows.exchange(sent, [n] * size, [n] * size).wait()
        own = torch.arange(size * n).view(size, n)[rank]
        same &= torch.equal(got, torch.cat([own * (member + 1) for member in range(size)]))
    return same, opened.count


def test_the_window_that_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    assert on_ranks(evicted, "U2", str(tmp_path)) == [(True, MOST_WINDOWS + 4)] * 2


def test_pieces_of_other_sizes_from_every_member_lie_in_the_order_of_the_members() -> None:
    """One process plays all members of a group whose sizes all differ."""
    to = [[3, 1, 2], [2, 5, 1], [4, 2, 6]]
    of = [list(column) for column in zip(*to, strict=True)]
    ends = [Ends(tuple(t), tuple(o)) for t, o in zip(to, of, strict=True)]
    shared = [torch.zeros(max(map(sum, of)), dtype=torch.uint8) for _ in to]

    class Window:
        def of(self, member: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return in_bytes(shared[member], shape, dtype)

        def meet(self) -> None:
            """They come one after another."""

    for rank in range(3):
        engine = CopyEngine(
            rank,
            3,
            agree=lambda own: ends,
            open=lambda n: Window(),
            settled=lambda: None,
            copy=copied_lines,
        )
        sent = torch.cat([torch.full((n,), 10 * rank + i) for i, n in enumerate(to[rank])])
        engine.exchange(sent.to(torch.uint8), to[rank], of[rank], 0)
    for member in range(3):
        want = [10 * rank + member for rank in range(3) for _ in range(to[rank][member])]
        assert shared[member][: len(want)].tolist() == want


def refused(mesh: Mesh, hosts: Sequence[str], reach: bool) -> str:
    """What by_copy_engine says on a rank of these hosts."""
    with (
        patch.object(copy_engine.socket, "gethostname", lambda: hosts[mesh.rows.rank]),
        patch.object(torch.cuda, "can_device_access_peer", lambda own, other: reach),
        pytest.raises(Unavailable) as caught,
    ):
        by_copy_engine(mesh.rows, torch.device("cuda", mesh.rows.rank))
    return str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "reach", "words"),
    [
        (("a", "b"), True, "ranks on hosts a and b share no memory"),
        (("a", "a"), False, "GPU 0 does not reach the memory of GPU 1"),
    ],
)
def test_ranks_that_do_not_reach_each_other_are_all_refused(
    hosts: tuple[str, str], reach: bool, words: str
) -> None:
    for said in on_ranks(refused, "U2", hosts, reach):
        assert re.search(f"transport copy_engine.*{words}; choose transport collective", said)


def test_a_cpu_has_no_copy_engines() -> None:
    with pytest.raises(ValueError, match="collective on device cpu with layout U2"):
        demo_plan(layout="U2", transport="copy_engine")
    with pytest.raises(ValueError, match="transport must be one of collective, copy_engine"):
        Plan(name="x", models=demo_plan().models, transport="pigeon")


def test_a_record_tells_that_copies_were_at_work() -> None:
    plan: Any = demo_plan(device="cuda", transport="copy_engine")
    assert exchanges(plan, Mesh(rows=Group(size=2))) == ["transport copy_engine"]
    assert exchanges(plan, ALONE) == exchanges(plan, Mesh(weights=Group(size=2))) == []
