"""`launch.py parity` with a plan, with pictures, with events: what applies, what contradicts."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.parity import command
from runtime.parity.dump import palette, write_frames
from runtime.parity.golden import Golden
from runtime.parity.judge import replay_case
from runtime.parity.metrics import compare
from runtime.parity.places import Place, place_of
from runtime.parity.plans import read_plan
from runtime.parity.settings import denoiser, plan_of, settings_of
from runtime.parity.setup import Setup
from tests.parity.test_parity_honest import GOLDENS, parity

CPU_PLAN = read_plan("cpu")
BF16 = replace(CPU_PLAN, dtype="bf16")


def golden(case: str) -> Path:
    return GOLDENS / f"{case}.safetensors"


# ---- what a plan decides


@pytest.mark.parametrize(
    ("case", "changed", "reason"),
    [
        ("unit_pruned_bf16", {}, "captured in bf16 and plan cpu computes in fp32"),
        (
            "unit_nvfp4_mixed_native_bf16",
            {"dtype": "bf16"},
            "nvfp4 layers were captured as nvfp4_native computes and plan cpu names nvfp4_dequant",
        ),
        (
            "unit_nvfp4_mixed_dequant_bf16",
            {"dtype": "bf16", "fp8": "fp8_native"},
            "float8_e4m3fn layers were captured as fp8_dequant computes and plan cpu names",
        ),
        (
            "vae_decode_5f_64x64_modules_fp16",
            {},
            "captured with the video VAE in fp16 and plan cpu runs it in fp32",
        ),
        ("unit_pruned_fp32", {"attention": "sdpa_cudnn"}, "backend 'sdpa_cudnn' cannot run here"),
        (
            "unit_pruned_bf16",
            {"dtype": "bf16", "dense": "quack"},
            "backend 'quack' cannot run here: it needs a CUDA GPU",
        ),
        (
            "unit_pruned_bf16",
            {"dtype": "bf16", "dense": "fp8_rowwise"},
            "captured as dense computes and plan cpu names fp8_rowwise",
        ),
        ("vae_decode_tlat1_32x48", {"vae_attention": "sage2"}, "backend 'sage2' cannot run here"),
        ("unit_pruned_fp32", {"elementwise": "kitchen"}, "cannot run here"),
    ],
)
def test_what_contradicts_the_golden_or_cannot_run_is_unsupported_with_its_reason(
    case: str, changed: dict[str, str], reason: str, tiny_checkpoints: Path, cpu_paths: str
) -> None:
    setup = Setup(plan=replace(CPU_PLAN, **changed))  # type: ignore[arg-type]
    result = replay_case(golden(case), tiny_checkpoints, cpu_paths, setup)
    assert result.status == "unsupported"
    assert reason in result.reason


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("t2va_22f_img2img_denoise05", {"fp8": "fp8_native", "nvfp4": "nvfp4_native"}),
        ("unit_pruned_bf16", {"dtype": "bf16"}),
        ("vae_decode_tlat1_32x48", {"dtype": "bf16"}),
        ("schedules", {"dtype": "bf16"}),
    ],
)
def test_what_a_golden_has_no_use_for_does_not_contradict_it(
    case: str, changed: dict[str, str], tiny_checkpoints: Path, cpu_paths: str
) -> None:
    setup = Setup(plan=replace(CPU_PLAN, **changed))  # type: ignore[arg-type]
    result = replay_case(golden(case), tiny_checkpoints, cpu_paths, setup)
    assert result.status in ("bit-equal", "pass", "info"), result.reason
    assert cpu_paths != "pinned" or result.status == "bit-equal"
    origins = {s["field"]: s["from"] for s in result.settings}
    assert origins["device"] == "plan"
    assert origins.get("dtype", "golden") == "golden"


def test_a_plans_island_rounding_is_really_used(tiny_checkpoints: Path, cpu_paths: str) -> None:
    case = golden("unit_nvfp4_mixed_dequant_bf16")
    rounded = replay_case(case, tiny_checkpoints, cpu_paths, Setup(plan=BF16))
    kept = Setup(plan=replace(BF16, island_rounding="keep"))
    unrounded = replay_case(case, tiny_checkpoints, cpu_paths, kept)
    assert unrounded.equal < rounded.equal


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("attention = 3\n", "attention in p.toml must be str, got 3"),
        ("attension = 'sdpa'\n", "unknown key 'attension' in p.toml"),
        ("device = 'tpu'\n", "plan field device must be one of cuda, cpu"),
        ("= 3\n", "is not valid TOML"),
        ("models = 3\n", r"models in p.toml must be a table like \[models\], got 3"),
        ("[models]\ndit = 3\n", "dit in p.toml must be a path in quotes, got 3"),
        ("[models]\ndit_file = 'x'\n", r"unknown key 'dit_file' in \[models\] of p.toml; it has"),
        ("[models]\ndit = '~nosuchuser/x'\n", "~nosuchuser/x leads nowhere"),
        ("[models]\ndeepstack_layers = 3\n", "must be three whole numbers .* got 3"),
        ("[models]\ndeepstack_layers = [1, 2]\n", r"three whole numbers .* got \[1, 2\]"),
        ("[models]\ndeepstack_layers = [0, 1, '2']\n", "must be three whole numbers"),
        ("[models]\ndeepstack_layers = [0, 1, true]\n", "must be three whole numbers"),
    ],
)
def test_a_bad_plan_is_refused_in_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_plan(str(path))


def test_a_plan_with_memory_low_is_refused_as_parity_looks_inside_its_attention() -> None:
    asked = argparse.Namespace(jobs=1, threads=1, unpinned=False, device=None)
    said = r"memory low, whose attention runs in groups of heads, .* set memory = \"plain\""
    with pytest.raises(ValueError, match=said):
        command._check(asked, replace(CPU_PLAN, memory="low"))


@pytest.mark.parametrize("name", ["nothing", "../cpu", "/tmp/none.toml"])
def test_a_plan_that_is_not_there_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no plan .* cpu, h200x1"):
        read_plan(name)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"attention": "kj", "kj_mode": "fp16_triton"}, {"kj_mode": "fp16_triton"}),
        ({"attention": "sol", "sol_tau": 0.5}, {"sol_tau": "0.5", "sol_sinks": "conditioning"}),
        ({"attention": "sdpa", "kj_mode": "fp16_triton"}, {}),
    ],
)
def test_the_options_of_the_attention_are_those_of_the_plan_and_are_told(
    fields: dict[str, str], told: dict[str, str], tiny_checkpoints: Path
) -> None:
    path = golden("unit_pruned_fp32")
    setup = Setup(plan=replace(CPU_PLAN, **fields))  # type: ignore[arg-type]
    case = Golden(path)
    settings = {s["field"]: s["value"] for s in settings_of(case, tiny_checkpoints, setup)}
    assert settings["attention"] == fields["attention"]
    options = ("kj_mode", "sol_tau", "sol_sinks")
    assert {name: settings[name] for name in options if name in settings} == told
    replayed = plan_of(case, denoiser(case, tiny_checkpoints), setup)
    assert all(getattr(replayed, name) == value for name, value in fields.items())


# ---- figures


def test_every_figure_of_a_known_difference() -> None:
    want = torch.tensor([3.0, 4.0, 0.0, -1.0])
    c = compare("final/video", want + torch.tensor([0.0, 0.0, 0.5, 0.0]), want, run="", stage="")
    assert (c.max_abs, c.mean_abs) == (0.5, 0.125)
    assert c.relative_l2 == pytest.approx(0.5 / math.sqrt(26))
    assert c.cosine == pytest.approx(26 / math.sqrt(26 * 26.25))
    assert c.psnr == pytest.approx(10 * math.log10(5**2 / (0.25 / 4)))  # value range 5


def test_pixels_have_the_peak_of_pixels() -> None:
    want = torch.full((1, 2, 2, 3), 0.25)
    c = compare("decode/video", want + 0.1, want, run="", stage="")
    assert c.psnr == pytest.approx(20.0, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("step_03/x_video", Place(step=3, part="video", quantity="x")),
        ("step_11/denoised_audio", Place(step=11, part="audio", quantity="denoised")),
        ("step_00/net_pos/v_audio", Place(step=0, part="audio", quantity="velocity")),
        ("step_00/net_neg/v_video", Place(step=0, part="video", quantity="velocity (negative)")),
        ("step_02/neg_denoised_video", Place(step=2, part="video", quantity="denoised (negative)")),
        ("final/audio", Place(part="audio")),
        ("layout/pos/position_ids", Place()),
    ],
)
def test_a_tensors_place_is_told_from_its_name(name: str, place: Place) -> None:
    assert place_of(name, "stage") == place


# ---- pictures


def test_no_two_colours_of_the_heat_map_are_equal() -> None:
    assert len(np.unique(palette(), axis=0)) == 256


def test_frames_of_another_size_are_said_and_not_drawn(tmp_path: Path) -> None:
    found = write_frames(
        tmp_path / "f", "out/video", torch.zeros(2, 4, 4, 3), torch.zeros(2, 4, 6, 3)
    )
    assert found == {"reason": "the golden's pictures are 2x4x4x3, ours 2x4x6x3"}
    assert not (tmp_path / "f").exists()


def test_values_that_are_not_finite_are_the_brightest(tmp_path: Path) -> None:
    got = torch.zeros(1, 4, 4, 3)
    got[0, 1, 2, 0] = math.nan
    found = write_frames(tmp_path / "f", "out/video", torch.zeros(1, 4, 4, 3), got)
    (frame,) = found["frames"]
    assert (frame["equal"], frame["max_abs"]) == (False, None)
    with Image.open(tmp_path / "f" / "difference_0000.png") as picture:
        levels = np.asarray(picture)
    assert levels[1, 2] == 255
    assert levels.sum() == 255


# ---- the command


def test_the_command_writes_pictures_and_events_as_json_lines(
    tmp_path: Path, tiny_checkpoints: Path
) -> None:
    case = golden("t2va_22f_img2img_denoise05")
    words = ("--checkpoints", tiny_checkpoints, "--json", tmp_path / "r.json", "--jobs", "1")
    done = parity(case, case, *words, "--dump", tmp_path / "d", "--events", "--plan", "cpu")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    named = [e["event"] for e in events if e["event"] != "step"]
    assert (named[0], named[-1]) == ("begin", "end")
    assert sorted(named[1:-1]) == ["case", "case", "result", "result"]
    steps = [(e["run"], e["done"], e["total"]) for e in events if e["event"] == "step"]
    assert steps[:4] == [("free", k, 4) for k in (1, 2, 3, 4)]
    assert all(len(line) < 4096 for line in done.stdout.splitlines())
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["plan"], report["device"]) == ("cpu", "cpu")
    assert [r["frames"]["folder"] for r in report["results"]] == [case.stem, f"{case.stem}.2"]
    assert len(list((tmp_path / "d" / case.stem).glob("*.png"))) == 3 * 22


def test_a_plan_with_a_step_cache_exits_with_2(tmp_path: Path) -> None:
    plan = tmp_path / "cached.toml"
    plan.write_text('device = "cpu"\ncache = "h3_cache"\ncache_threshold = 0.1\n')
    done = parity(golden("schedules"), "--plan", plan)
    assert done.returncode == 2
    assert "plan cached has the step cache h3_cache, which leaves steps out" in done.stderr
    assert 'set cache = "off"' in done.stderr


def test_a_device_that_contradicts_the_plan_exits_with_2(tmp_path: Path) -> None:
    done = parity(golden("schedules"), "--plan", "cpu", "--device", "cuda")
    assert done.returncode == 2
    assert "--device cuda contradicts plan cpu, which names cpu" in done.stderr
