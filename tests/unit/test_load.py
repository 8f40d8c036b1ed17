"""The load test in small: the order, and that its checks can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import load


def test_jobs_of_several_clients_all_run_once_in_order() -> None:
    report = load.run(6, 3, seconds=120, quick=False)  # the speed of a busy machine is no fault
    assert report["faults"] == [] and report["list_requests"] > 0


def job(runs: Path, id: str, position: int, started: float, **more: Any) -> dict[str, Any]:
    """A job that took a second, with its record."""
    (runs / id).mkdir()
    results = more.pop("results", 1)
    with (runs / id / "events.jsonl").open("w") as file:
        file.writelines([json.dumps({"event": "Result"}) + "\n"] * results)
    return {
        "id": id,
        "position": position,
        "started": started,
        "ended": started + 1,
        "state": "done",
    } | more


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"position": 0}, "not run in the order"),
        ({"started": 1.5}, "b began before a had ended"),
        ({"state": "failed"}, "not all are done"),
        ({"results": 2}, "b ran 2 times"),
        ({"results": 0}, "b ran 0 times"),
    ],
)
def test_each_fault_is_seen(tmp_path: Path, second: dict[str, Any], words: str) -> None:
    listed = [
        job(tmp_path, "a", 1, 1.0),
        job(tmp_path, "b", **({"position": 2, "started": 2.0} | second)),
    ]
    (fault,) = load._faults(tmp_path, ["a", "b"], listed)
    assert words in fault


def test_a_lost_job_is_seen(tmp_path: Path) -> None:
    listed = [job(tmp_path, "a", 1, 1.0)]
    assert load._faults(tmp_path, ["a", "b"], listed) == ["2 jobs were made and 1 are there"]
