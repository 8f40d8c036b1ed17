"""Every golden of tests/goldens, replayed free and staged: bit-equal where the CPU is pinned."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from runtime.parity.golden import Golden
from runtime.parity.judge import replay_case
from runtime.parity.replay import H3_KINDS
from runtime.parity.report import CaseResult

HERE = Path(__file__).parent
GOLDENS = HERE.parent / "goldens"
EXPECTED = json.loads((HERE / "expected.json").read_text())


@functools.cache
def _replayed(case: str, checkpoints: Path, cpu_paths: str) -> CaseResult:
    return replay_case(GOLDENS / f"{case}.safetensors", checkpoints, cpu_paths)


@pytest.mark.parametrize("case", EXPECTED["names"])
def test_a_golden_is_met_free_and_staged(case: str, tiny_checkpoints: Path, cpu_paths: str) -> None:
    result = _replayed(case, tiny_checkpoints, cpu_paths)
    allowed = ("bit-equal",) if cpu_paths == "pinned" else ("bit-equal", "pass", "info")
    assert result.status in allowed, f"{result.first} {result.reason}"
    assert result.compared > 0


def test_no_fewer_goldens_are_bit_equal_than_before(tiny_checkpoints: Path, cpu_paths: str) -> None:
    if cpu_paths != "pinned":
        pytest.skip(cpu_paths)
    results = [_replayed(case, tiny_checkpoints, cpu_paths) for case in EXPECTED["names"]]
    assert sum(r.status == "bit-equal" for r in results) >= EXPECTED["bit_equal"]


def test_no_golden_was_added_or_lost_without_saying_so() -> None:
    found = sorted(p.stem for p in GOLDENS.glob("*.safetensors"))
    assert found == EXPECTED["names"]
    assert len(found) == EXPECTED["cases"] == EXPECTED["bit_equal"]


def test_the_kept_goldens_cover_every_kind_and_every_request_mode() -> None:
    goldens = [Golden(GOLDENS / f"{name}.safetensors") for name in EXPECTED["names"]]
    captured = {"capture"}  # users' own runs: test_captures.py makes one
    assert {g.kind for g in goldens} == set(H3_KINDS) - captured
    requests = [g.params for g in goldens if g.kind == "e2e"]
    assert {p["mode"] for p in requests} == {"t2va", "ref2va", "fl2va", "guide"}
    assert {p["compute"] for p in requests} == {"fp32", "bf16"}
    assert {p["dit"] for p in requests} >= {
        "h3_tiny_pruned_bf16",
        "h3_tiny_bf16",
        "h3_tiny_pruned_nvfp4_mixed",
        "h3_tiny_pruned_int8_convrot",
    }


def test_this_processor_could_be_pinned_unless_it_is_not_x86_with_avx2(cpu_paths: str) -> None:
    assert cpu_paths == "pinned" or "torch was imported" not in cpu_paths
