"""LTX schedules and trajectories: what a wrong replay or a strange golden of them is told as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.ltx import denoise
from runtime.parity import ltx_files
from runtime.parity.replay import ltx_sampling
from tests.parity.test_ltx_goldens import Tensors, nothing, only, replayed, rewritten


@pytest.fixture
def stage1(ltx_goldens: Path) -> Path:
    """A trajectory of the ancestral sampler with a frozen frame."""
    return only(ltx_goldens, "ltx_sampler", "model_pre_a2v.step.7.x.video")


def test_one_form_does_not_pass_for_the_other(
    ltx_goldens: Path, stage1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(ltx_files.PROGRAMS["comfy_post_a2v"], v2a_source="pre_a2v")
    monkeypatch.setitem(ltx_files.PROGRAMS, "comfy_post_a2v", wrong)
    result = replayed(stage1, ltx_goldens)
    assert result.status == "FAIL"
    off = {d["name"]: d["relative_max"] for d in result.details if d["run"] == "free"}
    assert off["comfy_post_a2v.final.audio"] > 1e-3 and off["comfy_post_a2v.final.video"] > 1e-3
    assert off["comfy_pre_a2v.final.audio"] < 1e-5


def test_the_first_wrong_step_is_named(
    ltx_goldens: Path, stage1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that forgets its noise at step 3: the state of step 4 is the first to see it."""

    def forgetful(at: Any, noise: Any, *rest: Any) -> Any:
        if at.step == 3:
            noise = denoise.Streams(video=0 * noise.video, audio=0 * noise.audio)
        return original(at, noise, *rest)

    original = denoise.advance
    monkeypatch.setattr(denoise, "advance", forgetful)
    monkeypatch.setattr(ltx_sampling, "advance", forgetful)
    result = replayed(stage1, ltx_goldens)
    assert result.status == "FAIL"
    off = {
        (d["run"], d["name"])
        for d in result.details
        if d["relative_max"] is None or d["relative_max"] > 1e-5
    }
    for program in ltx_files.PROGRAMS:
        assert ("free", f"{program}.step.3.x0.audio") not in off
        assert ("free", f"{program}.step.4.x.audio") in off
        staged = [n for run, n in off if run == "staged" and n.startswith(program)]
        assert sorted(staged) == [f"{program}.step.4.x.audio", f"{program}.step.4.x.video"]


def test_other_noise_than_the_seeds_is_noticed(
    ltx_goldens: Path, stage1: Path, tmp_path: Path
) -> None:
    def seeded(header: Any) -> None:
        header["params"]["step_noise_seed"] += 1

    result = replayed(rewritten(stage1, tmp_path / "a.safetensors", nothing, seeded), ltx_goldens)
    wrong = {d["name"] for d in result.details if not d["equal"] and d["stage"] == "noise"}
    assert result.status == "FAIL" and "in.noise.video" not in wrong
    assert {f"model_pre_a2v.step.{step}.noise.video" for step in range(7)} <= wrong


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"eta": 0.5}, "eta 0.5: only 1 is implemented"),
        ({"comfy_sampler": "heun"}, "sampler 'heun'; known: euler_ancestral, euler"),
    ],
)
def test_another_recipe_is_unsupported_by_name(
    ltx_goldens: Path, stage1: Path, tmp_path: Path, params: dict[str, Any], told: str
) -> None:
    path = rewritten(
        stage1, tmp_path / "a.safetensors", nothing, lambda h: h["params"].update(params)
    )
    result = replayed(path, ltx_goldens)
    assert (result.status, result.reason) == ("unsupported", told)


def test_what_is_stored_and_not_compared_is_told(
    ltx_goldens: Path, stage1: Path, tmp_path: Path
) -> None:
    def more(tensors: Tensors) -> None:
        tensors["model_pre_a2v.step.0.score.video"] = torch.zeros(1)

    result = replayed(rewritten(stage1, tmp_path / "a.safetensors", more), ltx_goldens)
    assert result.status == "unsupported" and "step.0.score.video" in result.reason

    def program(tensors: Tensors) -> None:
        tensors["other_program.final.video"] = torch.zeros(1)

    result = replayed(rewritten(stage1, tmp_path / "b.safetensors", program), ltx_goldens)
    assert result.status == "unsupported" and "program 'other_program'" in result.reason


def test_a_schedule_of_other_values_fails(ltx_goldens: Path, tmp_path: Path) -> None:
    source = only(ltx_goldens, "ltx_schedule")

    def nudged(tensors: Tensors) -> None:
        tensors["stage2"][1] += 1e-9
        tensors["unit.ancestral.3"][0, 0, 0] += 1e-3

    result = replayed(rewritten(source, tmp_path / "a.safetensors", nudged), ltx_goldens)
    wrong = {d["name"] for d in result.details if not d["equal"]}
    assert result.status == "FAIL"
    assert wrong - {"stage1.ancestral_coefficients_float64"} == {"stage2", "unit.ancestral.3"}
