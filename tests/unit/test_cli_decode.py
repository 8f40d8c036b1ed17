"""`launch.py decode`: the latents of a run become the same pictures again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import av
import numpy as np

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
    assert "x.safetensors is not a readable safetensors file" in done.stderr
    assert not (tmp_path / "x.mp4").exists()
