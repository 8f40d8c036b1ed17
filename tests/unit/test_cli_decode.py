"""`launch.py decode`: the latents of a run become the same pictures again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from app import presets
from launch import main
from runtime.h3.packing import LATENTS
from runtime.media.latents import check_latents
from runtime.messages import Plan
from tests.consoles import demo_plan
from tests.ltx_plans import plan_of

ROOT = Path(__file__).parents[2]


def launch(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch.py", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def pictures(path: Path) -> np.ndarray:
    with av.open(str(path)) as file:
        return np.stack([f.to_ndarray(format="rgb24") for f in file.decode(video=0)])


def test_decoding_the_latents_of_a_run_gives_its_pictures_again(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again.mp4"
    made = launch("generate", "--request", "demo", "--plan", "cpu", "--steps", "1", "--out", run)
    assert made.returncode == 0, made.stderr
    done = launch("decode", run / "latents.safetensors", "--out", again)  # plan.toml is beside it
    assert done.returncode == 0, done.stderr
    assert np.array_equal(pictures(again), pictures(run / "result.mp4"))


def test_without_a_plan_beside_the_latents_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"0")
    done = launch("decode", tmp_path / "x.safetensors", "--out", tmp_path / "x.mp4")
    assert done.returncode == 2
    assert "no plan.toml beside" in done.stderr and "--plan" in done.stderr


def test_a_file_that_holds_no_latents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"not safetensors")
    options = ("--plan", "cpu", "--out", tmp_path / "x.mp4")
    done = launch("decode", tmp_path / "x.safetensors", *options)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "x.safetensors is not a safetensors file" in done.stderr
    assert not (tmp_path / "x.mp4").exists()


@pytest.mark.parametrize(
    ("family", "video", "audio", "words"),
    [
        ("ltx", (1, 24, 2, 2, 2), (1, 32, 2, 9), "they must be [1,16,F,h,w] and [1,8,A,16]"),
        ("ltx", (1, 16, 2, 2, 2), (1, 8, 9, 16), "does not tell its frames a second"),
        ("h3", (1, 16, 2, 2, 2), (1, 8, 9, 16), "they must be [1,24,T,h,w] and [1,32,2,Ta]"),
        ("h3", (1, 24, 7, 2, 2), (1, 32, 2, 39), "last 0.917 s and go with 37 of sound; give the"),
    ],
)
def test_latents_are_looked_at_before_any_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    family: str,
    video: tuple[int, ...],
    audio: tuple[int, ...],
    words: str,
) -> None:
    def started(plan: Plan) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("app.cli.decode.Engine", started)
    plan = demo_plan()
    plan = plan_of(tmp_path / "models") if family == "ltx" else replace(plan, family="h3")
    (tmp_path / "plan.toml").write_text(presets.dump_plan(plan))
    save_file({"video": torch.zeros(video), "audio": torch.zeros(audio)}, tmp_path / "latents.st")
    options = ["decode", str(tmp_path / "latents.st"), "--out", str(tmp_path / "x.mp4")]
    assert main(options) == 2  # of LTX before its licence is asked for, too
    told = capsys.readouterr().err
    assert words in told and "licence" not in told.lower()


@pytest.mark.parametrize(
    ("latents", "least", "most"),  # of sound: 1, 5, 22 and 209 frames, and one more or less
    [(1, 1, 3), (2, 7, 10), (7, 35, 38), (62, 347, 350)],
)
def test_sound_and_pictures_end_within_one_frame(
    tmp_path: Path, latents: int, least: int, most: int
) -> None:
    path = tmp_path / "x.safetensors"

    def check(sound: int) -> None:
        tensors = {
            "video": torch.zeros(1, 24, latents, 1, 1),
            "audio": torch.zeros(1, 32, 2, sound),
        }
        save_file(tensors, path)
        check_latents(path, LATENTS)

    for sound in range(least, most + 1):
        check(sound)
    for sound in {least - 1, most + 1} - {0}:
        with pytest.raises(ValueError, match=f"x.safetensors holds {sound} latents of sound, whi"):
            check(sound)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64])
def test_latents_of_no_latents_dtype_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"video": torch.zeros(1, 24, 2, 2, 4), "audio": torch.zeros(1, 32, 2, 9, dtype=dtype)}
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"holds 'audio' as \w+; latents are F32, BF16, F16"):
        check_latents(tmp_path / "x.safetensors", LATENTS)


def test_latents_whose_request_is_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    tensors = {"video": torch.zeros(1, 24, 2, 2, 4), "audio": torch.zeros(1, 32, 2, 9)}
    save_file(tensors, tmp_path / "x.safetensors", {"h3_request": "[" * 100_000})
    with pytest.raises(ValueError, match="has a h3_request that is not JSON"):
        check_latents(tmp_path / "x.safetensors", LATENTS)


def test_a_rank_killed_while_it_decodes_leaves_no_part(tmp_path: Path) -> None:
    tensors = {"video": torch.zeros(1, 24, 62, 2, 4), "audio": torch.zeros(1, 32, 2, 350)}
    save_file(tensors, str(tmp_path / "x.safetensors"))
    (tmp_path / "download.part").touch()  # somebody else's
    command = ["launch.py", "decode", str(tmp_path / "x.safetensors"), "--plan", "cpu"]
    with subprocess.Popen(
        [sys.executable, *command, "--out", str(tmp_path / "x.mp4")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (parts := list(tmp_path.glob("x.mp4.*.part"))):
            assert process.poll() is None, "the decode ended before its rank could be killed"
            time.sleep(0.002)
        os.kill(int(parts[0].name.split(".")[-2]), signal.SIGKILL)
        out, rest = process.communicate()
    assert process.returncode == 1 and "rank 0 died" in rest
    assert json.loads(out) == {"ok": False, "video": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["download.part", "x.safetensors"]


def test_a_latents_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    done = launch("decode", "~nosuchuser/x", "--plan", "cpu", "--out", tmp_path / "x.mp4")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "~nosuchuser/x leads nowhere" in done.stderr
