"""What the console shows of the last gate of a backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.gates import Gate, gates
from app.jobs import JobStore
from app.validated import Validated


def keep(root: Path, name: str, **changes: Any) -> None:
    told = {
        "device": "cpu",
        "backends": ["sage2"],
        "options": [],
        "classes": ["int8_attention"],
        "status": "passed",
        "reason": "",
        "worst": {"video": 0.04653, "audio": 0.0121},
        "when": 100.0,
    }
    (root / "gate").mkdir(exist_ok=True)
    text = json.dumps(told | changes)
    (root / "gate" / f"{name}.json").write_text(text, encoding="utf-8")


def test_a_passed_gate_tells_class_and_worst_of_both_streams(tmp_path: Path) -> None:
    keep(tmp_path, "a")
    assert gates(tmp_path, {"cpu"})["sage2"] == Gate(
        backend="sage2",
        text="passed (int8_attention, worst video 0.047, audio 0.012)",
        status="passed",
        when=100.0,
    )


def test_a_gate_of_another_device_does_not_count(tmp_path: Path) -> None:
    keep(tmp_path, "a", device="NVIDIA H200")
    assert gates(tmp_path, {"cpu"}) == {}
    assert "sage2" in gates(tmp_path, {"NVIDIA H200"})


def test_a_failed_gate_of_one_field_is_not_hidden_by_a_newer_passed_one(tmp_path: Path) -> None:
    keep(tmp_path, "dense", status="failed", worst={"video": None, "audio": 0.5})
    keep(tmp_path, "fp8", when=200.0)
    assert gates(tmp_path, {"cpu"})["sage2"].text == (
        "failed (int8_attention, worst video not finite, audio 0.5)"
    )


def test_an_option_that_is_not_the_default_is_named(tmp_path: Path) -> None:
    keep(tmp_path, "a", backends=["sol"], options=["sol_sinks none"])
    assert gates(tmp_path, {"cpu"})["sol"].text.startswith("sol_sinks none: passed (")


def test_an_unavailable_backend_has_its_reason(tmp_path: Path) -> None:
    keep(tmp_path, "a", status="unavailable", reason="it needs a CUDA device")
    assert gates(tmp_path, {"cpu"})["sage2"].text == "unavailable (it needs a CUDA device)"


@pytest.mark.parametrize("text", ["{", "[]", '{"device": "cpu"}', '{"device": ["cpu"]}'])
def test_a_damaged_file_tells_nothing(tmp_path: Path, text: str) -> None:
    keep(tmp_path, "a")
    (tmp_path / "gate" / "b.json").write_text(text, encoding="utf-8")
    assert list(gates(tmp_path, {"cpu"})) == ["sage2"]


def test_a_backends_state_has_the_gate(tmp_path: Path) -> None:
    keep(tmp_path, "a", status="failed")
    store = JobStore(tmp_path)
    state = Validated(store, tmp_path).states(["cpu"])["sage2"]
    store.close()
    assert state.gate.startswith("failed (int8_attention")
    assert (state.gate_status, state.text) == ("failed", "not validated on this machine")
