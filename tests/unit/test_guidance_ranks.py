"""Guidance on gloo ranks of which each has one side, against ranks that have both in turn.

Those are bit-equal. Against one process a side may differ as its ranks' sums do (LIMIT of
test_parallel_model.py); guidance makes up to 2 cfg - 1 times that of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.engine import Engine
from runtime.h3.conditioning import Conditioning
from runtime.h3.denoise import Shifts, Side, draw_noise, sample
from runtime.layouts import LAYOUTS, SINGLE, Layout, check_guidance
from runtime.messages import CachedStep, Failure, Ready, Ref2VARequest, Result
from runtime.meter import COMMUNICATION, StepMeter
from runtime.parallel.mesh import ALONE, Mesh
from runtime.parallel.sides import Sides
from tests.denoiser_parts import CPU, conditioning, demo_plan
from tests.rank_processes import on_ranks
from tests.wide_denoiser import SIGMAS, TARGET, Case, model_of, request

CFG = 3.5
BF16 = Case(fields={"dtype": "bf16"})
# An outlier row of the positive side: its largest activation would change the negative's codes
NATIVE = Case(stored="nvfp4", fields={"nvfp4": "nvfp4_native", "dtype": "bf16"}, outlier=40.0)
CASES = {"fp32": Case(), "bf16": BF16, "nvfp4_native": NATIVE}
LIMIT = 1e-6 * (2 * CFG - 1)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one rank: both streams, what each step predicted, evaluations and seconds of waiting."""

    final: dict[str, Tensor]
    taps: dict[str, Tensor]
    evaluated: int
    waited: float


def negative() -> Conditioning:
    """Three words, no references: 66 rows where the positive side has 84."""
    return conditioning((1, 1, 1))


def guided(mesh: Mesh, case: Case) -> Seen:
    """Three steps of both sides."""
    meter = StepMeter("cpu")
    model = model_of(case, mesh, meter)
    calls: list[int] = []
    taps: dict[str, Tensor] = {}

    def side(built: Conditioning) -> Side:
        made = Side(model, built, TARGET, seed=7, shifts=Shifts(), device=CPU)
        evaluate = made.evaluate

        def counted(*operands: object) -> tuple[Tensor, Tensor]:
            calls.append(1)
            return evaluate(*operands)  # type: ignore[arg-type]

        made.evaluate = counted
        return made

    with torch.inference_mode():
        positive, other = side(request(case)), side(negative())
        assert (positive.layout.num_rows, other.layout.num_rows) == (84, 66)
        meter.open()
        final = sample(
            positive,
            other,
            cfg=CFG,
            sampler="res_multistep",
            sigmas=SIGMAS,
            noise=draw_noise(TARGET, 7),
            start=None,
            on_step=lambda step: None,
            tap=lambda name, value: taps.update({name: value.clone()}),
            sides=Sides.of(mesh, meter),
        )
        waited = meter.read(meter.close(), 1000.0)[COMMUNICATION]
    streams = {"video": final.video, "audio": final.audio}
    return Seen(final=streams, taps=taps, evaluated=len(calls), waited=waited)


def all_cases(mesh: Mesh, names: list[str]) -> dict[str, Seen]:
    """One start of the processes for all of a layout."""
    return {name: guided(mesh, CASES[name]) for name in names}


def names_of(layout: str) -> list[str]:
    """Ranks that share weights sum up in bf16 otherwise: fp32 alone."""
    return ["fp32"] if "TP" in layout else list(CASES)


@functools.cache
def alone() -> dict[str, Seen]:
    """One process."""
    return all_cases(ALONE, list(CASES))


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("inner", [SINGLE, "U2", "TP2"])
def test_each_side_has_its_ranks_and_all_get_what_one_process_gets(inner: str) -> None:
    layout = "CFG2" if inner == SINGLE else f"CFG2x{inner}"
    ranks = on_ranks(all_cases, layout, names_of(layout))
    in_turn = [alone()] if inner == SINGLE else on_ranks(all_cases, inner, names_of(inner))
    for rank, cases in enumerate(ranks):
        own, other = ("pos", "neg") if rank < len(in_turn) else ("neg", "pos")
        for case, seen in cases.items():
            want = in_turn[rank % len(in_turn)][case]
            assert (seen.evaluated, want.evaluated) == (3, 6)
            assert seen.waited > 0 and (want.waited > 0) == (inner != SINGLE)
            missing = want.taps.keys() - seen.taps.keys()
            assert missing == {name for name in want.taps if f"/net_{other}/" in name}
            assert any(f"/net_{own}/" in name for name in seen.taps)
            for name, value in {**seen.taps, **seen.final}.items():
                assert torch.equal(value, {**want.taps, **want.final}[name]), (case, rank, name)
                assert relative(value, {**alone()[case].taps, **alone()[case].final}[name]) <= LIMIT


def test_the_predictions_differ_by_side() -> None:
    """Or an exchange of the wrong ones would not be seen above."""
    taps = alone()["fp32"].taps
    for step in range(3):
        sides = [taps[f"step_{step:02d}/{side}_denoised_video"] for side in ("pos", "neg")]
        assert relative(*sides) > 1e-3


def test_layouts_are_named_as_they_are_parsed_and_hold_eight_ranks_at_most() -> None:
    for name in LAYOUTS:
        layout = Layout.parse(name)
        assert layout.name == name
        assert layout.ranks == layout.guidance * layout.tensor * layout.ulysses <= 8
    assert Layout.parse("CFG2xTP2xU2") == Layout(guidance=2, tensor=2, ulysses=2)
    with pytest.raises(ValueError, match=r"layout must be one of single, U2.* got 'CFG3'"):
        Layout.parse("CFG3")


def grouped(mesh: Mesh) -> list[float]:
    """What the groups of this rank sum up to, each rank giving its number."""
    mine = torch.tensor([float(mesh.everyone.rank)])
    groups = (mesh.rows, mesh.weights, mesh.evaluation, mesh.sides, mesh.everyone)
    return [float(group.total(mine.clone())) for group in groups]


def test_a_rank_meets_its_like_of_the_other_side() -> None:
    assert on_ranks(grouped, "CFG2xU2") == [
        [1.0, 0.0, 1.0, 2.0, 6.0],
        [1.0, 1.0, 1.0, 4.0, 6.0],
        [5.0, 2.0, 5.0, 2.0, 6.0],
        [5.0, 3.0, 5.0, 4.0, 6.0],
    ]
    assert on_ranks(grouped, "CFG2xTP2") == [
        [0.0, 1.0, 1.0, 2.0, 6.0],
        [1.0, 1.0, 1.0, 4.0, 6.0],
        [2.0, 5.0, 5.0, 2.0, 6.0],
        [3.0, 5.0, 5.0, 4.0, 6.0],
    ]


def test_half_of_the_ranks_are_not_left_idle() -> None:
    with pytest.raises(ValueError, match=r"layout CFG2xU2 .* cfg is 1.0, which has none; choose"):
        check_guidance("CFG2xU2", 1.0)
    check_guidance("CFG2", 3.0)
    check_guidance(SINGLE, 1.0)
    check_guidance("U4", 1.0)


def made(layout: str, out: Path) -> tuple[dict[str, Tensor], tuple[CachedStep, ...]]:
    """What the whole line writes through the engine, and how a step cache answered."""
    plan = demo_plan(text_encoder="resident", threads=1, layout=layout, cache="easy_cache",
                     cache_warmup=1, cache_threshold=50.0)  # fmt: skip
    asked = Ref2VARequest(
        id="r", prompt="a calm sea", width=64, height=64, frames=5, steps=4, cfg=CFG,
        negative_prompt="rain",
    )  # fmt: skip
    with Engine(plan) as engine:
        assert isinstance(list(engine.start())[-1], Ready)
        *_, last = engine.generate(asked, out=out, media=False, preview=False)
        assert isinstance(last, Result), last
        other = out.with_name(f"{out.name}, cfg 1")
        *_, unguided = engine.generate(replace(asked, cfg=1.0), out=other, media=False)
    if layout == SINGLE:
        assert isinstance(unguided, Result)
    else:
        assert isinstance(unguided, Failure) and unguided.bad_input
        assert "gives half of its ranks the negative side" in unguided.reason
    return load_file(str(out / "latents.safetensors")), last.cached_steps


def test_a_request_through_the_engine_with_a_step_cache_of_each_side(tmp_path: Path) -> None:
    """A side's cache looks at that side's rows alone, which one rank has whole."""
    (want, answered), (got, told) = (made(layout, tmp_path / layout) for layout in (SINGLE, "CFG2"))
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert told == answered
    assert {(step.side, step.kind) for step in told} >= {
        ("positive", "reused"), ("negative", "reused"), ("negative", "computed"),
    }  # fmt: skip


def test_a_cache_that_would_see_a_part_of_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="cache must be off with layout CFG2xU2, got 'h3_cache'"):
        demo_plan(layout="CFG2xU2", cache="h3_cache")
