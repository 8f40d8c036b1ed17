"""What runs and parity of this console say about a backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from app import presets
from app.job import Job
from app.jobs import JobStore
from app.validated import Validated
from tests import fakes

PLAN = presets.load_plan(presets.find("plans", "cpu"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path)
    yield store
    store.close()


class Past:
    """Ended jobs of a folder, and what they left in it."""

    def __init__(self, store: JobStore, root: Path) -> None:
        self._store, self._root, self._count = store, root, 0
        self.validated = Validated(store, root)

    def _job(self, kind: Literal["generate", "parity"]) -> Path:
        self._count += 1
        id = f"job{self._count}"
        request = fakes.request(id=id) if kind == "generate" else None
        job = Job(
            id=id,
            kind=kind,
            owner="a",
            plan=PLAN,
            request=request,
            task={},
            state="done",
            created=float(self._count),
            ended=100.0 + self._count,
        )
        self._store.add(job)
        folder = self._root / id
        folder.mkdir()
        return folder

    def run(self, device: str = "cpu", **resolved: str) -> None:
        record = {
            "plan": {"attention": "sdpa", "elementwise": "eager"},
            "engine": {"resolved": {"device": device, "attention": "torch SDPA", **resolved}},
        }
        (self._job("generate") / "run.json").write_text(json.dumps(record))

    def parity(self, device: str = "cpu", **cases: str) -> None:
        settings = [
            {"field": "attention", "value": "sdpa", "from": "plan"},
            {"field": "nvfp4", "value": "nvfp4_dequant", "from": "plan"},
            {"field": "int8", "value": "int8_convrot", "from": "golden"},
        ]
        results: list[dict[str, Any]] = [
            {"case": case, "status": status, "settings": settings} for case, status in cases.items()
        ]
        report = {"device": device, "results": results}
        (self._job("parity") / "parity.json").write_text(json.dumps(report))

    def text(self, name: str = "sdpa") -> str:
        return self.validated.states(["cpu"])[name].text


@pytest.fixture
def past(store: JobStore, tmp_path: Path) -> Past:
    return Past(store, tmp_path)


def test_a_backend_without_a_run_was_never_run_here(past: Past) -> None:
    assert past.text() == "not validated on this machine"


def test_runs_are_counted_by_what_the_engine_resolved(past: Past) -> None:
    past.run(**{"linear nvfp4_dequant": "dequantise"})
    assert past.text() == "ran once"
    past.run()
    assert past.text() == "ran 2 times"
    assert past.text("nvfp4_dequant") == "ran once"
    assert past.text("eager") == "not validated on this machine"
    assert past.validated.states(["cpu"])["sdpa"].last == 102.0


def test_a_run_on_another_device_does_not_count(past: Past) -> None:
    past.run(device="NVIDIA H200")
    assert past.text() == "not validated on this machine"
    assert past.validated.states(["cpu", "NVIDIA H200"])["sdpa"].runs == 1


def test_a_linear_backend_that_a_golden_does_not_use_is_not_counted(past: Past) -> None:
    past.parity(a="bit-equal")
    assert past.text("nvfp4_dequant") == "not validated on this machine"
    assert past.text("int8_convrot") == "bit-equal on 1 golden"


@pytest.mark.parametrize(
    ("cases", "text", "verdict"),
    [
        ({"a": "bit-equal", "b": "bit-equal"}, "bit-equal on 2 goldens", "good"),
        ({"a": "bit-equal", "b": "pass"}, "within limits on 2 goldens, 1 bit-equal", "good"),
        ({"a": "FAIL"}, "parity failed on a of 1 golden", "bad"),
        ({"a": "FAIL", "b": "FAIL"}, "parity failed on a and 1 more of 2 goldens", "bad"),
        ({"a": "unsupported"}, "not validated on this machine", ""),
    ],
)
def test_parity_says_how_many_goldens_were_met(
    past: Past, cases: dict[str, str], text: str, verdict: str
) -> None:
    past.parity(**cases)
    state = past.validated.states(["cpu"])["sdpa"]
    assert (state.text, state.verdict) == (text, verdict)


def test_the_newest_parity_of_a_golden_counts(past: Past) -> None:
    past.parity(a="FAIL")
    past.parity(a="pass")
    past.run()
    assert past.text() == "ran once; within limits on 1 golden, 0 bit-equal"


def test_a_damaged_record_tells_nothing(past: Past, tmp_path: Path) -> None:
    past.run()
    (tmp_path / "job1" / "run.json").write_text("{")
    assert past.text() == "not validated on this machine"


def selftest(root: Path, *backends: dict[str, str], device: str = "cpu", when: float = 1.0) -> None:
    folder = root / "selftest"
    folder.mkdir(exist_ok=True)
    told = {"device": device, "when": when, "backends": backends}
    (folder / f"{device}.json").write_text(json.dumps(told))


def finding(backend: str, status: str) -> dict[str, str]:
    return {"backend": backend, "status": status, "reason": "0.9 off its fp32"}


def test_a_backend_that_passed_the_selftest_here_is_good(past: Past, tmp_path: Path) -> None:
    selftest(tmp_path, finding("sage2", "pass"), finding("fa4", "unavailable"))
    states = past.validated.states(["cpu"])
    assert (states["sage2"].text, states["sage2"].verdict) == ("self-test passed", "good")
    assert states["fa4"].text == "not validated on this machine"


def test_one_failed_field_of_the_selftest_makes_a_backend_bad(past: Past, tmp_path: Path) -> None:
    name = "fp8_rowwise"
    selftest(tmp_path, finding(name, "pass"), finding(name, "fail"), finding(name, "pass"))
    state = past.validated.states(["cpu"])[name]
    assert (state.text, state.verdict) == ("self-test failed: 0.9 off its fp32", "bad")


def test_a_selftest_of_another_machine_or_a_damaged_one_says_nothing(
    past: Past, tmp_path: Path
) -> None:
    selftest(tmp_path, finding("sage2", "pass"), device="NVIDIA H200")
    (tmp_path / "selftest" / "broken.json").write_text('{"device": "cpu"}')
    assert past.text("sage2") == "not validated on this machine"
