"""The probe of this machine: every backend with its reason, and no package that breaks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import probe as module
from runtime.kernels import attention, linear
from runtime.kernels.attention import AttentionBackend
from runtime.kernels.elementwise import BACKENDS as ELEMENTWISE
from runtime.kernels.unavailable import Unavailable
from runtime.machine import Device, machine
from runtime.probes import attention as attention_probe
from runtime.probes.base import FAR_OFF, Support, tried

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def run(path: Path | None = None) -> dict[str, Any]:
    """What the command prints, with `path` before all packages."""
    done = subprocess.run(
        [sys.executable, "-m", "runtime.probe"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(path or ""), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_every_backend_is_told_with_what_a_plan_and_a_person_need() -> None:
    told = run()
    names = {kind: [backend["name"] for backend in told[kind]] for kind in module.SECTIONS}
    assert names == {
        "attention": list(attention.BACKENDS),
        "linear": list(linear.BACKENDS),
        "elementwise": list(ELEMENTWISE),
    }
    assert told["problems"] == [] and [d["device"] for d in told["devices"]] == ["cpu"]
    for kind in module.SECTIONS:
        for backend in told[kind]:
            assert backend["requirement"] and backend["takes"] and backend["field"]
            (on_cpu,) = backend["devices"]
            assert on_cpu["available"] == (on_cpu["reason"] == "") == bool(on_cpu["route"])
    assert {b["field"] for b in told["linear"]} == {"dense", "nvfp4", "fp8", "int8"}
    assert told["machine"]["torch"] == torch.__version__ and told["machine"]["cpu"]
    assert told["kitchen"]["backends"]["eager"] == ""


def test_a_broken_comfy_kitchen_takes_its_own_sections_only(tmp_path: Path) -> None:
    (tmp_path / "comfy_kitchen.py").write_text("print('hello')\nraise OSError('libcuda: damaged')")
    told = run(tmp_path)
    assert told["linear"] == [] and told["elementwise"] == []
    assert [backend["name"] for backend in told["attention"]] == list(attention.BACKENDS)
    assert told["attention"][0]["devices"][0]["available"]
    assert len(told["problems"]) == 3
    assert all("OSError: libcuda: damaged" in problem for problem in told["problems"])


def test_a_backend_whose_package_breaks_on_import_is_one_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> AttentionBackend:
        raise RuntimeError("undefined symbol: _ZN3c10\nat line 7")

    monkeypatch.setattr(attention_probe, "attention_backend", broken)
    (first, *_) = attention_probe.backends((CPU,))
    assert first.name == "sdpa" and not first.devices[0].available
    reason = "its file cannot be imported: RuntimeError: undefined symbol: _ZN3c10"
    assert first.devices[0].reason == reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unavailable("x", "it needs a newer GPU"), "it needs a newer GPU"),
        (RuntimeError("no kernel image\nmore"), "RuntimeError: no kernel image"),
        (ZeroDivisionError(), "ZeroDivisionError: "),
    ],
)
def test_what_a_trial_raises_is_the_reason(error: Exception, reason: str) -> None:
    def trial() -> float:
        raise error

    assert tried(CPU, lambda: "k", trial) == Support(device="cpu", available=False, reason=reason)


@pytest.mark.parametrize(
    ("deviation", "said"), [(FAR_OFF, ""), (0.5, "is 0.5 off"), (float("nan"), "is not finite")]
)
def test_a_kernel_that_computes_something_else_is_not_available(
    deviation: float, said: str
) -> None:
    support = tried(CPU, lambda: "the kernel", lambda: deviation)
    assert support.available == (said == "")
    assert said in support.reason and ("the kernel" in support.reason + support.route)


def test_a_wrong_attention_is_found_by_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.transpose(1, 2).flatten(2)

    backend = AttentionBackend(name="sdpa", load=lambda d, o: wrong, route=lambda d, o: "wrong")
    monkeypatch.setattr(attention_probe, "attention_backend", lambda name: backend)
    (first, *_) = attention_probe.backends((CPU,))
    assert not first.devices[0].available and "it ran (wrong)" in first.devices[0].reason


def test_layouts_say_why_they_cannot_run() -> None:
    gpu = Device(device="cuda:0", name="GPU", capability="9.0", memory_bytes=1)
    rows = {row["name"]: row for row in module._layouts((gpu, gpu, gpu))}  # CPU and two GPUs
    assert list(rows)[:3] == ["CPU", "single: 1 GPU", "U2: 2 GPUs"]
    assert all(rows[name]["available"] for name in ("CPU", "single: 1 GPU", "TP2: 2 GPUs"))
    assert rows["TP2xU2: 4 GPUs"]["ranks"] == 4
    assert rows["U4: 4 GPUs"]["reason"] == "this machine has 2 CUDA GPUs"


def test_without_cuda_the_machine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert machine().no_cuda.endswith("is a build without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("runtime.machine.driver", lambda: "")
    assert machine().no_cuda == "no NVIDIA driver is loaded"
    monkeypatch.setattr("runtime.machine.driver", lambda: "NVRM 580")
    assert machine().no_cuda.endswith("(CUDA 13.0) sees no device")


def test_gpus_are_told_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(number: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"RTX {number}", major=12, minor=0, total_memory=96 << 30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)
    found = module.devices()[1:]
    assert [d.device for d in found] == ["cuda:0", "cuda:1"]
    assert found[1] == Device(
        device="cuda:1", name="RTX 1", capability="12.0", memory_bytes=96 << 30
    )
