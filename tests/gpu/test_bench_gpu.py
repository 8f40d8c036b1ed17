"""A benchmark of tiny random weights on a GPU: events, the profiler's classes, peak memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import main

pytestmark = pytest.mark.gpu

PLAN = """
device = "cuda"
dtype = "bf16"
attention = "sdpa_cudnn"
vae_attention = "sdpa"
elementwise = "triton"
[models]
dit = "random"
text_encoder = "random"
video_vae = "random"
audio_vae = "random"
"""
LTX_PLAN = """
family = "ltx"
device = "cuda"
dtype = "bf16"
attention = "sdpa"
video_vae_dtype = "bf16"
[models]
dit = "random"
text_encoder = "random"
video_vae = "random"
audio_vae = "random"
"""
TINY = ("--request", "demo", "--text-rows", "40", "--random-size", "tiny", "--runs", "2")


def told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, weights: str = "pruned_bf16"
) -> dict[str, Any]:
    plan = tmp_path / "tiny.toml"
    plan.write_text(PLAN)
    asked = ["bench", "--plan", str(plan), *TINY, "--random-weights", weights, *options]
    asked += ["--store", str(tmp_path / "runs")]
    assert main(asked) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_parts_of_a_step_add_up_and_memory_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = told(tmp_path, capsys)["subjects"]
    parts = sum(part["median"] for part in one["parts"].values())
    assert parts == pytest.approx(one["step_seconds"]["median"], rel=0.5)
    assert 0 < one["peak_allocated_bytes"] <= one["peak_reserved_bytes"]
    assert one["stages"]["video VAE decode"]["min"] > 0
    assert "cudnn" in one["resolved"]["attention"]


def test_the_profiler_finds_attention_and_products_in_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = told(tmp_path, capsys, "--profile", "--no-decode")["subjects"]
    profile = one["profile"]
    assert min(profile["seconds"]["attention"], profile["seconds"]["GEMM"]) > 0
    whole = sum(profile["seconds"].values()) - profile["overlap_seconds"]
    assert whole == pytest.approx(profile["step_seconds"], rel=0.05)


def test_diffusers_takes_turns_with_us(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    peer = ("--peer", "diffusers", "--no-decode")
    found = told(tmp_path, capsys, *peer, weights="full_bf16")
    assert found["order"] == "A B A B"
    assert len({one["rows"] for one in found["subjects"]}) == 1


def test_ltx_tells_the_steps_of_its_two_stages_with_parts_profile_and_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    plan = tmp_path / "ltx.toml"
    plan.write_text(LTX_PLAN)
    asked = ["--plan", str(plan), "--request", "ltx_demo", "--random-weights", "bf16"]
    asked += ["--random-size", "tiny", "--runs", "2", "--profile", "--no-decode"]
    asked += ["--peer", "diffusers", "--peer-attention", "native"]
    assert main(["bench", *asked, "--store", str(tmp_path / "runs")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for one in found["subjects"]:
        assert 0 < one["peak_allocated_bytes"] <= one["peak_reserved_bytes"]
        assert [of["step_seconds"]["n"] for of in one["sampling"]] == [16, 6]
        assert all(of["profile"]["seconds"]["GEMM"] > 0 for of in one["sampling"])
    for of in found["subjects"][0]["sampling"]:
        parts = sum(part["median"] for part in of["parts"].values())
        assert parts == pytest.approx(of["step_seconds"]["median"], rel=0.5)


def test_the_selftest_passes_on_this_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "selftest.json"
    status = main(["selftest", "--device", "cuda", "--no-goldens", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [one for one in result["backends"] if one["status"] == "fail"] == []
    assert status == 0
