"""A gate of a plan of several ranks against one on a single device, on CPU ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import launch
from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.base import Checkpoint
from runtime.h3.denoise import predicted
from runtime.messages import Plan, Ref2VARequest
from runtime.nonfinite import NonFinite
from runtime.parallel.mesh import ALONE, Mesh
from runtime.parity import gate_plans, gate_runs
from runtime.parity.gate_cases import Case, random_case
from runtime.parity.gate_judge import UNAVAILABLE, judge
from runtime.parity.gate_ranks import RankFailed, evaluations
from runtime.parity.gate_references import References
from runtime.parity.gate_runs import Run, Trajectory
from tests.denoiser_parts import FILES, demo_plan
from tests.rank_processes import on_ranks
from tests.unit.test_gate_command import SMALL, plan_file, small  # noqa: F401  (a fixture)

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


def test_ranks_of_each_side_are_held_to_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "guided.toml"
    request.write_text(SMALL + "cfg = 3.5\n", encoding="utf-8")
    p, q, out = plan_file(tmp_path, layout="CFG2"), plan_file(tmp_path), tmp_path / "out.json"
    where = ("--request", request, "--text-rows", "7", "--runs", tmp_path / "runs", "--json", out)
    assert gate("--plan", p, "--against", q, *where) == 0
    assert "layout CFG2 against single" in capsys.readouterr().out
    told = json.loads(out.read_text())
    assert told["status"] == "passed" and max(told["worst"].values()) < 1e-5
    assert len(told["results"][0]["steps"]) == 2


def test_a_case_without_a_negative_side_has_no_verdict_on_ranks_of_sides() -> None:
    case = random_case(REQUEST, 7, partial(open_checkpoint, FILES.dit, "dit"), "label")
    verdict = judge(demo_plan(layout="CFG2"), demo_plan(), case, NoReference())
    assert verdict.status == UNAVAILABLE and "no negative side" in verdict.reason


def guided_case() -> Case:
    request = replace(REQUEST, cfg=3.5, steps=6)
    return random_case(request, 7, partial(open_checkpoint, FILES.dit, "dit"), "label")


CACHED = {"cache": "easy_cache", "cache_warmup": 1, "cache_threshold": 50.0}


def both(mesh: Mesh, plan: Plan, reference: Trajectory) -> tuple[Trajectory, Trajectory]:
    run = Run(plan, guided_case(), mesh)
    return run.forced(reference), run.free()


@pytest.mark.parametrize("cache", [{}, CACHED])
def test_each_side_s_ranks_find_what_one_process_finds(cache: dict[str, object]) -> None:
    """Velocities of both sides, and the steps that a cache of either has answered."""
    plan = demo_plan(**cache)
    reference = Run(demo_plan(), guided_case()).free()
    want = both(ALONE, plan, reference)
    assert bool(want[0].skipped) == bool(cache)
    for found in on_ranks(both, "CFG2", replace(plan, layout="CFG2"), reference):
        for got, expected in zip(found, want, strict=True):
            assert got.skipped == expected.skipped
            for one, other in zip(got.steps, expected.steps, strict=True):
                for name in ("x", "velocity", "denoised"):
                    pair, there = getattr(one, name), getattr(other, name)
                    assert torch.equal(pair.video, there.video), name
                    assert torch.equal(pair.audio, there.audio), name
    velocities = [step.velocity.video for step in want[1].steps]
    assert not torch.equal(velocities[0], velocities[1])


def test_a_baseline_runs_on_one_device(tmp_path: Path) -> None:
    plan = demo_plan(layout="U2", overlap="qkv", amax="local")
    found, _ = gate_plans.baseline(plan)
    assert (found.layout, found.overlap, found.amax) == ("single", "off", "shared")


@pytest.mark.parametrize(
    ("p", "q", "options", "words"),
    [
        ({}, {"layout": "U2"}, (), "the reference of a gate runs on one device"),
        ({"layout": "CFG2"}, {}, (), "half of its ranks the negative side, and no case has one"),
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


class Spoilt:
    """Opens the demo denoiser; on one rank something else happens first."""

    def __init__(self, rank: int, way: str) -> None:
        self.rank, self.way = rank, way

    def __call__(self) -> Checkpoint:
        if dist.is_initialized() and self.rank in (dist.get_rank(), EVERY):
            if self.way == "dies":
                os._exit(3)
            if self.way == "raises":
                raise MemoryError("no room for the weights")
            gate_runs.predicted = self.not_finite  # type: ignore[attr-defined]
        return open_checkpoint(FILES.dit, "dit")

    def not_finite(self, *args: Any) -> Tensor:
        """The forced run's second step."""
        if args[6] == 1:
            raise NonFinite("denoise step 2", "the video latent")
        return predicted(*args)


EVERY = -1


def spoilt(rank: int, way: str) -> tuple[Plan, Case, Trajectory]:
    case = random_case(REQUEST, 7, partial(open_checkpoint, FILES.dit, "dit"), "label")
    reference = References().free(demo_plan(), case, -1)
    return demo_plan(layout="U2"), replace(case, open=Spoilt(rank, way)), reference


@pytest.mark.parametrize(
    ("rank", "way", "words"),
    [
        (1, "dies", "rank 1 ended: its process died (exit code 3; out of memory?)"),
        (0, "dies", "rank 0 ended: its process died (exit code 3; out of memory?)"),
        (1, "raises", "rank 1 ended: MemoryError: no room for the weights"),
        (1, "not finite", "rank 1 ended: denoise step 2 produced non-finite values in the video"),
        (0, "not finite", "rank 0 ended: denoise step 2 produced non-finite values in the video"),
    ],
)
def test_a_rank_that_fails_alone_is_named_and_ends_all(rank: int, way: str, words: str) -> None:
    """Not the other one, which finds its connection closed."""
    began = time.monotonic()
    with pytest.raises(RankFailed, match=re.escape(words)):
        evaluations(*spoilt(rank, way), -1)
    assert time.monotonic() - began < 60
    assert not multiprocessing.active_children()


def test_what_every_rank_finds_is_told_once_without_a_rank() -> None:
    with pytest.raises(ValueError, match=r"^denoise step 2 produced non-finite"):
        evaluations(*spoilt(EVERY, "not finite"), -1)
