"""A machine without PyAV (a lent GPU, say) still writes latents and float frames of a prompt.

And one without the web's packages still runs every command but `serve`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_pyav(tmp_path: Path) -> dict[str, str]:
    """An environment whose `av` cannot be imported, in the engine's process neither."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "av.py").write_text("raise ImportError('no av here')\n")
    return {**os.environ, "PYTHONPATH": str(hidden)}


def generate(
    environment: dict[str, str], out: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    command = ["launch.py", "generate", "--plan", "cpu", "--request", "demo", "--out", str(out)]
    return subprocess.run(
        [sys.executable, *command, *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_prompt_without_media_needs_no_pyav(without_pyav: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = generate(without_pyav, out, "--no-media", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert (out / "latents.safetensors").is_file()
    assert (out / "audio.safetensors").is_file()
    assert len(list((out / "frames").glob("*.npy"))) == 22


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
def test_a_command_line_needs_no_web_server(tmp_path: Path, command: str) -> None:
    for name in ("fastapi", "starlette", "gradio", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    done = subprocess.run(
        [sys.executable, "launch.py", command, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage"), done.stderr


@pytest.mark.parametrize("more", [(), ("--no-media", "--ref-image", "docs/any.png")])
def test_what_needs_pyav_says_so_before_anything_is_loaded(
    without_pyav: dict[str, str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    done = generate(without_pyav, tmp_path / "run", *more)
    assert done.returncode == 2
    assert "need PyAV" in done.stderr and "pip install" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
