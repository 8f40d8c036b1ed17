"""The doctor's findings on machines and plans with one thing wrong each."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app import doctor, presets
from app.access import LOCAL, User
from app.cli.doctor import port_finding
from app.doctor import Finding, Machine, examine, summary
from app.errors import Forbidden
from app.routes import doctor as route
from runtime.messages import Plan
from tests.fake_nvml import FakeNvml, h200s
from tests.ltx_plans import plan_of

DEVICE = {"name": "NVIDIA H200", "compute": "9.0", "memory_bytes": 140 << 30, "uuid": "GPU-1"}


@pytest.fixture
def plan() -> Plan:
    return presets.load_plan(presets.find("plans", "cpu"))


def machine(**changes: Any) -> Machine:
    told = {"torch": "2.13.0", "cuda": "13.0", "reason": "", "devices": [DEVICE]}
    return Machine(**{"nvml": h200s(1), "devices": lambda: told, **changes})


def found(plan: Plan, here: Machine, root: Path = Path("runs")) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(plan, root, here)}


def test_a_whole_machine_with_a_whole_plan_is_fit(plan: Plan, tmp_path: Path) -> None:
    findings = found(plan, machine(), tmp_path)
    assert {f.status for f in findings.values()} <= {"ok", "warning"}
    assert "580.82.07, serves CUDA up to 13.0" in findings["driver"].text
    assert "18 NVLinks" in findings["GPU 0"].text
    assert summary(tuple(findings.values()))["ok"] is True


@pytest.mark.parametrize(("device", "status"), [("cuda", "fatal"), ("cpu", "ok")])
def test_a_missing_driver_is_fatal_only_for_a_plan_that_needs_a_gpu(
    plan: Plan, device: str, status: str
) -> None:
    none = {"torch": "2.13.0+cpu", "cuda": "", "reason": "no GPU", "devices": []}
    here = machine(nvml=FakeNvml(driver=False), devices=lambda: none)
    findings = found(replace(plan, device=device), here)
    for name in ("driver", "CUDA in torch"):
        assert findings[name].status == status
        assert bool(findings[name].todo) == (status != "ok")


def test_torch_that_cannot_be_imported_is_fatal_in_its_own_words(plan: Plan) -> None:
    def broken() -> Any:
        raise ValueError("torch failed: libcudart.so.13 is missing")

    finding = found(plan, machine(devices=broken))["CUDA in torch"]
    assert (finding.status, "libcudart" in finding.text) == ("fatal", True)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("numpy>=2,<3", "ok"),
        ("numpy>=1,<2", "warning"),
        ("numpy>=900", "warning"),
        ("no-such-package>=1", "fatal"),
    ],
)
def test_packages_are_held_against_the_pins(
    plan: Plan, tmp_path: Path, line: str, status: str
) -> None:
    pins = tmp_path / "pyproject.toml"
    pins.write_text(f"[project]\ndependencies = ['{line}']\n")
    finding = found(plan, machine(pins=pins))[line.split(">")[0]]
    assert finding.status == status
    assert (line in finding.todo) == (status != "ok")


def test_a_missing_checkpoint_is_fatal_and_names_its_path(plan: Plan, tmp_path: Path) -> None:
    gone = replace(plan, models=replace(plan.models, dit=tmp_path / "gone.safetensors"))
    finding = found(gone, machine())["denoiser"]
    assert finding.status == "fatal" and "gone.safetensors is not there" in finding.text


def test_a_checkpoint_of_another_model_is_fatal(plan: Plan) -> None:
    swapped = replace(plan, models=replace(plan.models, dit=plan.models.audio_vae))
    finding = found(swapped, machine())["denoiser"]
    assert finding.status == "fatal" and "holds no denoiser" in finding.text


def test_a_checkpoint_that_is_none_is_fatal(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "words.safetensors"
    file.write_text("these are words, not tensors")
    broken = replace(plan, models=replace(plan.models, video_vae=file))
    assert found(broken, machine())["video VAE"].status == "fatal"


def test_advice_on_a_folder_is_told_once(tmp_path: Path) -> None:
    ltx = plan_of(tmp_path)
    (tmp_path / "vocoder" / "config.json").unlink()
    finding = found(ltx, machine(), tmp_path)["vocoder"]
    assert finding == Finding(
        name="vocoder",
        status="fatal",
        text=f"{tmp_path / 'vocoder'} has no config.json, which plan mine needs",
        todo="put a folder of that layout there or change [models] in the plan",
    )
    wrong = replace(ltx, models=replace(ltx.models, vocoder=ltx.models.video_vae))
    finding = found(wrong, machine(), tmp_path)["vocoder"]
    assert "the vocoder must be a LTX2VocoderWithBWE" in finding.text
    assert (finding.todo, "change" in finding.text) == ("change [models] in plan mine", False)
    gone = replace(ltx, models=replace(ltx.models, vocoder=tmp_path / "gone"))
    finding = found(gone, machine(), tmp_path)["vocoder"]
    assert finding.todo == "put the folder there, or change [models] in plan mine"
    none = replace(ltx, models=replace(ltx.models, vocoder=None))
    finding = found(none, machine(), tmp_path)["vocoder"]
    assert (finding.text, finding.todo) == ("plan mine names no vocoder", "add it to [models]")


def test_advice_on_a_licence_is_told_once(tmp_path: Path) -> None:
    finding = found(plan_of(tmp_path), machine(), tmp_path)["licence"]
    assert finding.status == "warning"
    assert finding.text.endswith("of 2026-08-11 is acknowledged")
    assert finding.todo.startswith("read it, then give --acknowledge-licence ltx-2.x to")
    gone = replace(plan_of(tmp_path), models=replace(plan_of(tmp_path).models, dit=tmp_path / "x"))
    finding = found(gone, machine(), tmp_path)["licence"]
    assert "is not there" in finding.text and finding.todo == "see what is said of the denoiser"


def test_a_tokenizer_folder_without_its_files_is_fatal(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    named = replace(plan, models=replace(plan.models, tokenizer=tmp_path))
    finding = found(named, machine())["tokenizer"]
    assert finding.status == "fatal" and "has no merges.txt" in finding.text


def test_a_runs_folder_that_is_a_file_is_fatal(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "runs"
    file.write_text("")
    assert found(plan, machine(), file)["disk of the runs"].status == "fatal"


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "fatal"), (1 << 30, "warning")])
def test_little_disk_is_said(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    usage = SimpleNamespace(free=free, total=1 << 40)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    assert found(plan, machine())["disk of the runs"].status == status


def test_missing_shared_memory_is_a_warning(plan: Plan, tmp_path: Path) -> None:
    assert found(plan, machine(shm=tmp_path / "none"))["shared memory"].status == "warning"


def test_a_taken_port_is_a_warning_and_a_free_one_ok() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port_finding("127.0.0.1", port).status == "warning"
    assert port_finding("127.0.0.1", port).status == "ok"
    assert port_finding("127.0.0.1", 70_000).status == "warning"


def launched(*arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "launch.py", "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_the_command_ends_with_json_and_fails_only_on_fatal(plan: Plan, tmp_path: Path) -> None:
    status, lines = launched("--port", "0")
    assert (status, json.loads(lines[-1])["ok"]) == (0, True)
    assert all(line.startswith(("ok ", "warning ", "fatal ")) for line in lines[:-1])
    gone = replace(plan, models=replace(plan.models, dit=tmp_path / "gone.safetensors"))
    (tmp_path / "gone.toml").write_text(presets.dump_plan(gone))
    status, lines = launched("--json", "--plan", str(tmp_path / "gone.toml"))
    assert (status, len(lines), json.loads(lines[0])["fatal"]) == (1, 1, 1)


def client(plan: Plan, root: Path, user: User) -> TestClient:
    host = FastAPI()
    console: Any = SimpleNamespace(root=root, session=SimpleNamespace(plan=plan))
    host.include_router(route.router(console, lambda: user))
    return TestClient(host)


def test_an_admin_gets_the_findings_of_the_sessions_plan(plan: Plan, tmp_path: Path) -> None:
    told = client(plan, tmp_path, LOCAL).get("/doctor").json()
    assert (told["plan"], told["ok"]) == ("cpu", True)
    assert not any(check["name"].startswith("port") for check in told["checks"])


def test_others_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="ask an admin"):
        client(plan, tmp_path, User(name="guest")).get("/doctor")


def test_the_ram_of_a_cpu_plan_counts_the_engine_process(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo engine holds about 550 MB for 26 MB of files."""
    memory = SimpleNamespace(available=500 << 20)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    finding = found(plan, machine())["RAM"]
    assert finding.status == "warning" and "plan cpu wants about 7" in finding.text
