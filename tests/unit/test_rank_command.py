"""`torchrun ... -m runtime.rank`: the elastic rendezvous, the worker of the engine, no console."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.presets import dump_plan
from tests.denoiser_parts import demo_plan

ROOT = Path(__file__).parents[2]
REQUEST = 'prompt = "a"\nwidth = 64\nheight = 64\nframes = 5\nsteps = 2\n'
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m"),
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    plan = demo_plan(layout="U2", threads=1)
    (tmp_path / "plan.toml").write_text(dump_plan(plan))
    (tmp_path / "request.toml").write_text(REQUEST)
    named = {"plan": "plan.toml", "request": "request.toml", "out": "out"}
    return [word for name, file in named.items() for word in (f"--{name}", str(tmp_path / file))]


def run(start: list[str], files: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*start, "runtime.rank", *files, "--no-media"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_two_ranks_of_torchrun_make_one_result(files: list[str], tmp_path: Path) -> None:
    done = run(TORCHRUN, files)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kind for event in events for kind in event].count("Result") == 1
    assert (tmp_path / "out" / "latents.safetensors").is_file()


def test_without_torchrun_it_says_how_to_start_it(files: list[str]) -> None:
    done = run([sys.executable, "-m"], files)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("not set; start it with torchrun")


def test_a_closed_stdout_leaves_the_status(files: list[str]) -> None:
    command = [sys.executable, "-m", "runtime.rank", *files]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "start it with torchrun" in done.stderr


def test_a_reader_of_stdout_that_leaves_ends_the_run(files: list[str], tmp_path: Path) -> None:
    """As in `torchrun ... | head -1`."""
    (tmp_path / "plan.toml").write_text(dump_plan(demo_plan(threads=1)))
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # of torchrun; nobody meets here
    started = subprocess.Popen(
        [sys.executable, "-m", "runtime.rank", *files],
        cwd=ROOT,
        env={**os.environ, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert started.stdout is not None and started.stderr is not None
    started.stdout.readline()
    started.stdout.close()
    said = started.stderr.read().decode()
    assert started.wait(60) == 1, said
    assert "rank 0: nobody reads stdout" in said


def test_a_layout_for_a_negative_side_that_is_none_starts_nothing(
    files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(dump_plan(demo_plan(layout="CFG2", threads=1)))
    done = run([sys.executable, "-m"], files)
    assert done.returncode == 2
    assert "layout CFG2 gives half of its ranks the negative side" in done.stderr


@pytest.mark.parametrize("option", ["plan", "request", "out"])
def test_the_home_of_nobody_is_one_sentence(option: str, files: list[str]) -> None:
    files[files.index(f"--{option}") + 1] = "~nosuchuser/x.toml"
    refused_for_nobody(run([sys.executable, "-m"], files))
    assert not (ROOT / "~nosuchuser").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("request.toml", REQUEST + '[[references]]\nkind = "image"\npath = "~nosuchuser/x.png"\n'),
        ("plan.toml", 'device = "cpu"\n[models]\ndit = "~nosuchuser/x.safetensors"\n'),
    ],
)
def test_a_file_that_names_the_home_of_nobody_is_one_sentence(
    file: str, text: str, files: list[str], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    refused_for_nobody(run([sys.executable, "-m"], files))


def refused_for_nobody(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2
    assert "runtime.rank: ~nosuchuser/x" in done.stderr and "leads nowhere" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_request_that_cannot_run_is_told_and_ends_all(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "request.toml").write_text(
        REQUEST + '[[references]]\nkind = "image"\npath = "none.png"\n'
    )
    done = run(TORCHRUN, files)
    assert done.returncode == 1
    assert "none.png" in done.stdout and "Failure" in done.stdout
