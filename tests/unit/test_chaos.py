"""kill -9 of engine and console: the short run of tests.chaos, and that it sees what it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import chaos
from tests.chaos import MARK, Chaos, Count


def test_no_kill_loses_a_job_or_leaves_a_process(tmp_path: Path) -> None:
    said: list[str] = []
    count = chaos.run(tmp_path, 2, demo=False, say=said.append)
    assert (count.lost, count.orphans, count.grown) == ([], [], False)
    assert len(said) == 4


def test_a_process_that_is_left_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "GONE_SECONDS", 0.3)
    seen = Chaos(tmp_path, demo=False)
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    environment = os.environ | {MARK: seen.mark}
    with subprocess.Popen(sleeper, env=environment, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None and left.stdout.readline()
        seen.see_orphans("here", set())
        left.kill()
    assert seen.count.orphans == [f"here: {left.pid} {' '.join(sleeper)}"]
    seen.see_orphans("afterwards", set())
    assert len(seen.count.orphans) == 1


@pytest.mark.parametrize(
    ("job", "record", "events", "words"),
    [
        (None, "done", 1, "is gone"),
        ("interrupted", "done", 1, "is interrupted and not done"),
        ("done", "interrupted", 1, "a folder that says interrupted"),
        ("done", "done", 2, "ended 2 times"),
        ("done", "done", 0, "ended 0 times"),
        ("done", "done", 1, ""),
    ],
)
def test_a_job_that_is_lost_or_ran_twice_is_counted(
    tmp_path: Path, job: str | None, record: str, events: int, words: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(json.dumps({"state": record}))
    (tmp_path / "a" / "events.jsonl").write_text('{"event": "Result"}\n' * events)
    found = job and {"state": job, "reason": "", "stage": "", "done": 0}
    problem = Chaos(tmp_path, demo=False).problem("a", "done", found or None)
    assert words in problem and bool(words) == bool(problem)


def test_memory_that_grows_is_counted_and_one_peak_is_not() -> None:
    assert Count(mib=[(100, 200), (130, 200), (130, 200), (130, 200)]).grown
    assert Count(mib=[(100, 200), (100, 300), (100, 300), (100, 300)]).grown
    assert not Count(mib=[(100, 200), (100, 200), (300, 300)]).grown
