"""What the next start makes of a folder that a killed console left, whenever it was killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import recovery
from app.history import History
from app.jobs import Job, JobStore
from app.runs import Run
from app.stored import plain
from runtime.messages import Failure, Note, Progress, Ready, Result, StageTime
from tests import fakes

READY = Ready(load_seconds=2.0, load_gib_per_s=1.0, resolved={"plan": "fake"})
STAGES = (
    StageTime(stage="denoise", seconds=3.0, step=0),
    StageTime(stage="end to end", seconds=4.0),
)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore(tmp_path) as store:
        yield store


def running(jobs: JobStore, id: str = "a", **fields: Any) -> Job:
    """A job that is claimed, as the console was killed."""
    plain: dict[str, Any] = {"kind": "generate", "request": fakes.request(id=id), "task": {}}
    plain |= {"owner": "local", "plan": fakes.plan(), "created": 1.0}
    jobs.add(Job(id=id, **(plain | fields)))
    claimed = jobs.claim()
    assert claimed is not None
    return claimed


def run_of(job: Job, root: Path, *events: Any) -> Run:
    assert job.request is not None
    run = Run(root / job.id, job.request, job.plan)
    for event in (READY, Note(request_id=job.id, text="a note"), *events):
        run.add(event)
    return run


def progress(done: int) -> Progress:
    return Progress(request_id="a", stage="denoise", done=done, total=12)


def result() -> Result:
    return Result(
        request_id="a",
        video=None,
        latents=None,
        stages=STAGES,
        peak_memory_bytes=5,
        record=Path("run.json"),
    )


def record(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "a" / "run.json").read_text(encoding="utf-8"))
    return found


def test_a_run_killed_in_a_step_is_interrupted_where_it_was(jobs: JobStore, tmp_path: Path) -> None:
    run_of(running(jobs), tmp_path, progress(2), STAGES[0], progress(3))
    with (tmp_path / "a" / "events.jsonl").open("a") as file:
        file.write('{"time": 3, "event": "Progr')  # the kill cut this line
    (job,) = recovery.recover(jobs, tmp_path)
    assert (job.state, job.stage, job.done, job.total) == ("interrupted", "denoise", 3, 12)
    assert "the console was killed" in job.reason and job.ended >= job.started
    written = record(tmp_path)
    assert (written["state"], written["failure"]["stage"]) == ("interrupted", "denoise")
    assert written["engine"] == plain(READY)
    assert written["notes"] == [{"text": "a note", "warning": False}]
    assert [stage["stage"] for stage in written["stages"]] == ["denoise"]


def test_zeros_that_a_power_cut_left_end_what_is_read(jobs: JobStore, tmp_path: Path) -> None:
    run_of(running(jobs), tmp_path, progress(2))
    with (tmp_path / "a" / "events.jsonl").open("ab") as file:
        file.write(b"\0" * 64 + b"\n\xff")
    (job,) = recovery.recover(jobs, tmp_path)
    assert (job.state, job.done) == ("interrupted", 2)


def test_latents_nobody_wanted_go_also_at_the_next_start(jobs: JobStore, tmp_path: Path) -> None:
    job = running(jobs, keep_latents=False)
    latents = tmp_path / "a" / "latents.safetensors"
    run_of(job, tmp_path, replace(result(), video=tmp_path / "a" / "result.mp4", latents=latents))
    latents.write_bytes(b"latents")
    recovery.recover(jobs, tmp_path)
    assert not latents.exists() and record(tmp_path)["result"]["latents"] is None


def test_parts_that_the_dead_ranks_were_building_are_removed(
    jobs: JobStore, tmp_path: Path
) -> None:
    run_of(running(jobs), tmp_path)
    (tmp_path / "a" / "result.mp4.12345.part").write_bytes(b"half")
    (tmp_path / "a" / "part.txt").write_bytes(b"mine")
    recovery.recover(jobs, tmp_path)
    assert not list((tmp_path / "a").glob("*.part")) and (tmp_path / "a" / "part.txt").exists()


def test_a_job_killed_before_its_folder_was_made_gets_one(jobs: JobStore, tmp_path: Path) -> None:
    running(jobs)
    (job,) = recovery.recover(jobs, tmp_path)
    assert (job.state, job.stage) == ("interrupted", "start")
    assert record(tmp_path)["request"]["prompt"] == "a calm sea"


def test_a_run_killed_after_its_last_event_is_done(jobs: JobStore, tmp_path: Path) -> None:
    run_of(running(jobs), tmp_path, progress(12), result())
    (job,) = recovery.recover(jobs, tmp_path)
    assert (job.state, job.reason) == ("done", "")
    assert record(tmp_path)["result"]["peak_memory_bytes"] == 5
    assert (tmp_path / "a" / "result.json").is_file()


def test_a_run_killed_after_its_record_is_what_the_record_says(
    jobs: JobStore, tmp_path: Path
) -> None:
    run = run_of(running(jobs), tmp_path, progress(12))
    run.finish(result(), READY, "done")
    (job,) = recovery.recover(jobs, tmp_path)
    assert job.state == "done"
    assert [times["denoise"] for _, times in jobs.times()] == [3.0]


@pytest.mark.parametrize("text", ["", '{"id": "a", "sta', "[]", "{}", '{"state": "odd"}', "\x00"])
def test_a_damaged_record_is_written_anew_from_the_events(
    jobs: JobStore, tmp_path: Path, text: str
) -> None:
    run_of(running(jobs), tmp_path, progress(3))
    (tmp_path / "a" / "run.json").write_text(text)
    (job,) = recovery.recover(jobs, tmp_path)
    assert (job.state, job.stage, job.done) == ("interrupted", "denoise", 3)
    assert record(tmp_path)["state"] == "interrupted"


@pytest.mark.parametrize("line", ["12", '{"time": 1}', '{"time": "x", "event": "Result"}', "null"])
def test_events_that_are_none_of_ours_cost_the_folder_and_not_the_start(
    jobs: JobStore, tmp_path: Path, line: str
) -> None:
    run_of(running(jobs), tmp_path)
    (tmp_path / "a" / "events.jsonl").write_text(line + "\n")
    (job,) = recovery.recover(jobs, tmp_path)
    assert job.state == "interrupted" and job.reason.endswith("its folder is damaged")


def test_a_file_in_the_place_of_a_run_folder_costs_no_start(jobs: JobStore, tmp_path: Path) -> None:
    running(jobs)
    (tmp_path / "a").write_text("x")
    (job,) = recovery.recover(jobs, tmp_path)
    assert job.state == "interrupted"


@pytest.mark.parametrize(("cancelled", "state"), [(True, "cancelled"), (False, "failed")])
def test_a_failure_that_was_told_is_kept(
    jobs: JobStore, tmp_path: Path, cancelled: bool, state: str
) -> None:
    last = Failure(request_id="a", stage="mux", reason="the disk is full", cancelled=cancelled)
    run_of(running(jobs), tmp_path, last)
    (job,) = recovery.recover(jobs, tmp_path)
    assert (job.state, job.reason) == (state, "the disk is full")


def test_a_cancel_that_the_kill_overtook_is_an_interruption(jobs: JobStore, tmp_path: Path) -> None:
    run_of(running(jobs), tmp_path, progress(1))
    jobs.update("a", state="cancelling")
    (job,) = recovery.recover(jobs, tmp_path)
    assert job.state == "interrupted"


def test_a_parity_job_is_interrupted_and_gets_no_record_of_ours(
    jobs: JobStore, tmp_path: Path
) -> None:
    running(jobs, kind="parity", request=None, task={"goldens": ["x"]})
    (job,) = recovery.recover(jobs, tmp_path)
    assert job.state == "interrupted" and not (tmp_path / "a").exists()


def test_waiting_and_ended_jobs_are_left_alone(jobs: JobStore, tmp_path: Path) -> None:
    running(jobs)
    jobs.update("a", state="done")
    plain: dict[str, Any] = {"kind": "generate", "owner": "local", "plan": fakes.plan()}
    jobs.add(Job(id="b", request=fakes.request(id="b"), task={}, created=2.0, **plain))
    assert recovery.recover(jobs, tmp_path) == ()
    assert (jobs.need("a").state, jobs.need("b").state) == ("done", "queued")


def test_a_run_of_the_command_line_is_adopted_with_its_times(
    jobs: JobStore, tmp_path: Path
) -> None:
    request, plan = fakes.request(id="20260101-000000_abcdef"), fakes.plan()
    run = Run(tmp_path / "my.run", request, plan)
    run.finish(result(), READY, "done")
    assert recovery.adopt(jobs, tmp_path, "local") == 1
    assert recovery.adopt(jobs, tmp_path, "local") == 0
    job = jobs.need("my.run")
    assert (job.state, job.owner, job.keep_latents) == ("done", "local", True)
    assert job.request is not None and job.request.id == "my.run"
    history = History()
    for done, times in jobs.times():
        assert done.request is not None
        history.add(done.request, done.plan, times)
    typical = history.typical(request, plan)
    assert typical is not None and (typical.run, typical.load) == (4.0, 2.0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"state": "done"}', '{"state": "running", "request": {}}', "\x00", "null"],
)
def test_a_record_that_is_none_of_ours_is_left_alone(
    jobs: JobStore, tmp_path: Path, text: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").write_text(text)
    assert recovery.adopt(jobs, tmp_path, "local") == 0
    assert (tmp_path / "x" / "run.json").read_text() == text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", math.nan),
        ("seconds", math.inf),
        ("failure", "x"),
        ("engine", "x"),
        ("stages", [{"stage": "denoise", "seconds": math.nan}]),
    ],
)
def test_a_record_with_a_field_that_no_job_can_have_is_left_alone(
    jobs: JobStore, tmp_path: Path, field: str, value: Any
) -> None:
    Run(tmp_path / "x", fakes.request(id="x"), fakes.plan()).finish(result(), READY, "done")
    file = tmp_path / "x" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    assert recovery.adopt(jobs, tmp_path, "local") == 0


@pytest.mark.parametrize("name", [".hidden", "a b", "a?b", "ü", "x" * 101])
def test_a_folder_whose_name_no_address_takes_is_not_adopted(
    jobs: JobStore, tmp_path: Path, name: str
) -> None:
    Run(tmp_path / name, fakes.request(), fakes.plan()).finish(result(), READY, "done")
    assert recovery.adopt(jobs, tmp_path, "local") == 0


def test_a_link_to_a_run_elsewhere_is_not_adopted(jobs: JobStore, tmp_path: Path) -> None:
    Run(tmp_path / "media" / "real", fakes.request(), fakes.plan()).finish(result(), READY, "done")
    (tmp_path / "linked").symlink_to(tmp_path / "media" / "real")
    assert recovery.adopt(jobs, tmp_path, "local") == 0
