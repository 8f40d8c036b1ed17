"""The self-test finds a wrong kernel, tells what cannot run, and leaves a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.selftests import selftests
from launch import main
from runtime.kernels.unavailable import Unavailable
from runtime.selftest.base import Finding, Trial, found
from runtime.selftest.command import result


def judged(exact: float, reference: float | None, *, lossy: bool) -> Finding:
    trial = Trial(route="kernel 1", exact_deviation=exact, reference_deviation=reference)
    return found("x", "attention", lossy=lossy, trial=lambda: trial)


@pytest.mark.parametrize(
    ("exact", "reference", "lossy", "status", "judge"),
    [
        (3e-3, None, False, "pass", "fp32"),
        (3e-2, 0.0, False, "fail", "fp32"),  # an exact one has no other judge
        (0.2, 1e-2, True, "pass", "CPU reference"),
        (0.2, 0.2, True, "fail", "CPU reference"),
        (0.2, None, True, "pass", "fp32"),
        (0.3, None, True, "fail", "fp32"),
        (float("nan"), None, False, "fail", "fp32"),
    ],
)
def test_a_backend_is_held_against_the_nearest_judge(
    exact: float, reference: float | None, lossy: bool, status: str, judge: str
) -> None:
    finding = judged(exact, reference, lossy=lossy)
    assert (finding.status, finding.judged_by) == (status, judge)
    assert bool(finding.reason) == (status == "fail")


def raising(error: Exception) -> Finding:
    def trial() -> Trial:
        raise error

    return found("x", "dense", lossy=True, trial=trial)


def test_a_backend_that_cannot_run_here_is_no_failure() -> None:
    finding = raising(Unavailable("x", "it needs a CUDA device"))
    assert (finding.status, finding.reason) == ("unavailable", "it needs a CUDA device")


def test_a_backend_that_breaks_is_a_failure_with_its_reason() -> None:
    finding = raising(RuntimeError("no kernel image\nmore"))
    assert (finding.status, finding.reason) == ("fail", "RuntimeError: no kernel image")


def test_the_command_tests_all_backends_of_the_cpu_and_the_console_reads_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "selftest" / "cpu.json"
    asked = ["selftest", "--device", "cpu", "--no-goldens", "--out", str(file)]
    assert main(asked) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"file": str(file), **json.loads(file.read_text())}
    status = {one["backend"]: one["status"] for one in told["backends"]}
    assert status["sdpa"] == status["nvfp4_native"] == status["eager"] == "pass"
    assert status["sdpa_cudnn"] == "unavailable"
    assert told["versions"]["torch"]
    assert selftests(tmp_path, ["cpu"])["sdpa"].passed


def test_a_failed_golden_fails_the_selftest() -> None:
    told = result("cpu", torch.device("cpu"), [], {"status": 1})
    assert not told["ok"]


def test_a_gpu_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device; give --device cpu" in capsys.readouterr().err


def test_a_folder_without_goldens_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selftest", "--device", "cpu", "--goldens", str(tmp_path / "none")]) == 2
    assert "is no folder of goldens" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_tested(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "result.json"
    assert main(["selftest", "--device", "cpu", "--no-goldens", "--out", str(out)]) == 2
    assert capsys.readouterr().out == ""
