"""A gate of a plan of several ranks against one on a single device, on CPU ranks."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import launch
from runtime.checkpoints import open_checkpoint
from runtime.messages import Plan, Ref2VARequest
from runtime.parity import gate_plans
from runtime.parity.gate_cases import Case, random_case
from runtime.parity.gate_judge import UNAVAILABLE, judge
from runtime.parity.gate_ranks import RankFailed, evaluations
from runtime.parity.gate_references import References
from runtime.parity.gate_runs import Trajectory
from tests.denoiser_parts import FILES, demo_plan
from tests.unit.test_gate_command import plan_file, small  # noqa: F401  (a fixture)

REQUEST = Ref2VARequest(id="gate", prompt="", width=64, height=64, frames=5, steps=2)


def gate(*options: str | Path) -> int:
    return launch.main(["gate", *map(str, options)])


@pytest.mark.parametrize("layout", ["U2", "TP2"])
def test_ranks_are_held_to_the_class_of_exact_kernels(
    layout: str,
    tmp_path: Path,
    small: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    p, q = plan_file(tmp_path, layout=layout), plan_file(tmp_path)
    where = ("--request", small, "--text-rows", "7", "--runs", tmp_path / "runs")
    assert gate("--plan", p, "--against", q, *where) == 0
    told = capsys.readouterr().out
    assert f"layout {layout} against single" in told
    assert "exact: 2 x sdpa_math against sdpa, this run" in told
    last = json.loads(told.splitlines()[-1])
    assert (last["status"], last["fields"]) == ("passed", [])
    assert max(last["worst"].values()) < 1e-5
    assert not (tmp_path / "runs").exists()  # it says nothing of any backend


def test_a_baseline_runs_on_one_device(tmp_path: Path) -> None:
    plan = demo_plan(layout="U2", overlap="qkv", amax="local")
    found, _ = gate_plans.baseline(plan)
    assert (found.layout, found.overlap, found.amax) == ("single", "off", "shared")


@pytest.mark.parametrize(
    ("p", "q", "options", "words"),
    [
        ({}, {"layout": "U2"}, (), "the reference of a gate runs on one device"),
        ({"layout": "CFG2"}, {}, (), "choose a layout without CFG2"),
        ({"layout": "U2"}, {}, ("--blocks", "1"), "--blocks compares whole blocks"),
    ],
)
def test_what_a_gate_cannot_evaluate_is_one_sentence(
    p: dict[str, str],
    q: dict[str, str],
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    small: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ("--request", small, "--text-rows", "7", "--runs", tmp_path / "runs")
    plans = ("--plan", plan_file(tmp_path, **p), "--against", plan_file(tmp_path, **q))
    assert gate(*plans, *where, *options) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_kernel_that_refuses_the_rows_on_ranks_has_no_verdict() -> None:
    case = random_case(REQUEST, 7, partial(open_checkpoint, FILES.dit, "dit"), "label")
    p = demo_plan(name="p", dtype="bf16", attention="sage1", layout="U2")
    verdict = judge(p, demo_plan(dtype="bf16"), case, References())
    assert verdict.status == UNAVAILABLE
    assert "rows are no multiple of 64" in verdict.reason


class NoReference(References):
    """Takes minutes, and is not asked."""

    def free(self, q: Plan, case: Case, block_step: int) -> Trajectory:
        raise AssertionError("a plan that cannot run needs no reference")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layout": "U2", "dense": "fp8_tensorwise", "overlap": "qkv"}, "overlap qkv"),
        ({"layout": "TP2", "dense": "fp8_rowwise"}, "layout TP2"),
        (
            {"layout": "U2", "nvfp4": "nvfp4_native", "gather": "packed_nvfp4"},
            "gather packed_nvfp4",
        ),
    ],
)
def test_what_a_layout_refuses_is_told_before_the_reference(
    fields: dict[str, object], words: str
) -> None:
    case = random_case(REQUEST, 7, partial(open_checkpoint, FILES.dit, "dit"), "label")
    verdict = judge(demo_plan(dtype="bf16", **fields), demo_plan(), case, NoReference())
    assert verdict.status == UNAVAILABLE and words in verdict.reason


def test_a_rank_that_dies_is_named() -> None:
    case = random_case(REQUEST, 7, partial(open_checkpoint, FILES.dit, "dit"), "label")
    reference = References().free(demo_plan(), case, -1)
    dying = replace(case, open=partial(os._exit, 3))
    with pytest.raises(RankFailed, match=r"rank [01] ended: exit code 3"):
        evaluations(demo_plan(layout="U2"), dying, reference, -1)
