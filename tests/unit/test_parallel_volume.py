"""The bytes that a step is said to move are those that ranks really hand to torch.distributed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.h3.conditioning import Conditioning
from runtime.h3.denoise import Shifts, Side, draw_noise, layout_of, sample
from runtime.h3.step_bytes import step_bytes
from runtime.layouts import Layout
from runtime.parallel.mesh import ALONE, Mesh
from runtime.parallel.sides import Sides
from runtime.parallel.volume import Moved, Shape, evaluation
from tests.denoiser_parts import CPU, conditioning, demo_plan
from tests.rank_processes import on_ranks
from tests.wide_denoiser import TARGET, Case, model_of, request

SIGMAS = torch.tensor([1.0, 0.4, 0.0])
STEPS = 2
CASES = {"fp32": Case(), "bf16": Case(fields={"dtype": "bf16"})}
NATIVE = Case(stored="nvfp4", fields={"nvfp4": "nvfp4_native", "dtype": "bf16"})
MORE = {
    "overlap": replace(CASES["bf16"], fields={"dtype": "bf16", "overlap": "qkv"}),
    "nvfp4_native": NATIVE,
    "rows split": replace(CASES["bf16"], fields={"dtype": "bf16", "row_split": "2:5"}),
}


class Seen:
    """Adds up what goes to other ranks and comes from them."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def exchange(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of dist.all_to_all_single."""
        received, sent, of, to = args
        rank = dist.get_rank(kwargs["group"])
        assert (sum(of), sum(to)) == (received.numel(), sent.numel())
        self.sent += (sent.numel() - to[rank]) * sent.itemsize
        self.received += (received.numel() - of[rank]) * received.itemsize
        return call(*args, **kwargs)

    def reduce(self, call: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of dist.all_reduce: a ring's, but for the largest activations."""
        if x.numel() > 1:
            ranks = dist.get_world_size(kwargs["group"])
            moved = 2 * (ranks - 1) * x.nbytes // ranks
            self.sent, self.received = self.sent + moved, self.received + moved
        return call(x, *args, **kwargs)


def negative() -> Conditioning:
    """Of other length than the positive side."""
    return conditioning((1, 1, 1))


def moved(mesh: Mesh, layout: str, cases: dict[str, Case], cfg: float) -> dict[str, list[Moved]]:
    """By case: what this rank moved in a step, and what every rank is expected to."""
    found = {}
    for name, case in cases.items():
        case = replace(case, fields={**case.fields, "layout": layout})
        model = model_of(case, mesh)
        built = [request(case)] if cfg == 1.0 else [request(case), negative()]
        seen = Seen()
        with (
            patch.object(dist, "all_to_all_single", partial(seen.exchange, dist.all_to_all_single)),
            patch.object(dist, "all_reduce", partial(seen.reduce, dist.all_reduce)),
            torch.inference_mode(),
        ):
            sides = [Side(model, one, TARGET, seed=7, shifts=Shifts(), device=CPU) for one in built]
            sample(
                sides[0],
                sides[1] if sides[1:] else None,
                cfg=cfg,
                sampler="euler",
                sigmas=SIGMAS,
                noise=draw_noise(TARGET, 7),
                start=None,
                on_step=lambda step: None,
                sides=Sides.of(mesh),
            )
        assert seen.sent % STEPS == seen.received % STEPS == 0
        packed = [layout_of(one, TARGET) for one in built]
        expected = step_bytes(model.cfg, demo_plan(**case.fields), packed, TARGET)
        found[name] = [Moved(seen.sent // STEPS, seen.received // STEPS), *expected]
    return found


@pytest.mark.parametrize(
    ("layout", "cfg"),
    [("U2", 1.0), ("U6", 1.0), ("TP3", 1.0), ("TP2xU2", 1.0), ("U2", 3.5), ("CFG2xU2", 3.5)],
)
def test_a_step_moves_what_its_shapes_say(layout: str, cfg: float) -> None:
    cases = CASES | MORE if layout == "U2" and cfg == 1.0 else {"bf16": CASES["bf16"]}
    ranks = on_ranks(moved, layout, layout, cases, cfg)
    for name in cases:
        expected = ranks[0][name][1:]
        assert [rank[name][0] for rank in ranks] == expected, name
        assert sum(m.sent for m in expected) == sum(m.received for m in expected) > 0


def test_packed_rows_move_what_their_shapes_say() -> None:
    fields = {**NATIVE.fields, "gather": "packed_nvfp4"}
    for layout, cfg in (("U2", 1.0), ("U4", 1.0), ("TP2xU2", 1.0), ("CFG2xU2", 3.5)):
        ranks = on_ranks(moved, layout, layout, {"gather": replace(NATIVE, fields=fields)}, cfg)
        assert [rank["gather"][0] for rank in ranks] == ranks[0]["gather"][1:]


@pytest.mark.parametrize(
    ("layout", "megabytes", "packed"),
    [
        ("U2", 294, 51.7),
        ("U4", 220.5, 62.0),
        ("U6", 163, 63.2),
        ("U7", 144, 63.3),
        ("U8", 128.6, 63.3),
    ],
)
def test_the_reference_request_moves_what_was_estimated_before(
    layout: str, megabytes: float, packed: float
) -> None:
    """Section 3.6 of the house's performance notes: 20,511 rows, MB a layer and rank; bf16, and
    with packed rows and packed outputs."""
    shape = Shape(
        rows=20511,
        targets=(),
        heads=56,
        head_dim=128,
        hidden=5376,
        blocks=1,
        value_bytes=2,
    )
    sent = [moved.sent / 1e6 for moved in evaluation(Layout.parse(layout), shape)]
    assert statistics.mean(sent) == pytest.approx(megabytes, rel=5e-3)
    shape = replace(shape, gathered=True)
    sent = [moved.sent / 1e6 for moved in evaluation(Layout.parse(layout), shape)]
    assert statistics.mean(sent) == pytest.approx(packed, rel=5e-3)


def test_one_rank_moves_nothing() -> None:
    case = Case()
    packed = [layout_of(request(case), TARGET)]
    assert step_bytes(model_of(case, ALONE).cfg, demo_plan(), packed, TARGET) == (Moved(),)
