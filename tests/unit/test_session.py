"""The session over a real engine with the fake family: queue, states, deaths, run folders."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app import presets
from app.session import MAX_WAITING, Job, Session, Snapshot
from runtime.messages import Failure, Plan, Reference, Result
from tests import fakes


def demo_plan() -> Plan:
    """The fake family under the demo's files, which preflight looks for."""
    return replace(presets.load_plan(presets.find("plans", "cpu")), family="fake")


def until(session: Session, met: Callable[[Snapshot], bool], seconds: float = 30.0) -> Snapshot:
    """The first snapshot that meets the condition."""
    deadline = time.monotonic() + seconds
    now = session.snapshot()
    while not met(now):
        assert time.monotonic() < deadline, now
        now = session.wait(now.version, 0.5)
    return now


def ended(session: Session, id: str) -> Job:
    """The job of a request, once it has ended."""
    job = until(session, lambda now: bool((j := now.job(id)) and j.ended)).job(id)
    assert job is not None
    return job


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    root = tmp_path_factory.mktemp("runs")
    with Session(demo_plan(), root=root, families=fakes.FAMILIES) as session:
        until(session, lambda now: now.engine == "ready")
        yield session


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Session]:
    with Session(demo_plan(), root=tmp_path, families=fakes.FAMILIES) as session:
        until(session, lambda now: now.engine == "ready")
        yield session


def test_a_request_ends_with_a_video_and_a_complete_run_folder(shared: Session) -> None:
    shared.submit(fakes.request(id="whole"))
    job = ended(shared, "whole")
    assert job.state == "done" and isinstance(job.last, Result)
    names = {path.name for path in job.folder.iterdir()}
    assert {"request.toml", "plan.toml", "events.jsonl", "run.json", "result.mp4"} <= names
    assert not [name for name in names if name.endswith(".part")]
    record = json.loads((job.folder / "run.json").read_text())
    assert record["state"] == "done" and record["engine"]["resolved"]["plan"] == "cpu"
    assert record["notes"][0]["text"] == "0 references"
    assert record["stages"][-1]["stage"] == "end to end"


def test_the_written_request_can_be_run_again(shared: Session) -> None:
    request = fakes.request('again "quoted"', id="again")
    shared.submit(request)
    folder = ended(shared, "again").folder
    assert presets.load_request(folder / "request.toml", id="again") == request
    assert presets.load_plan(folder / "plan.toml") == shared.plan


def test_events_are_lines_in_the_order_they_came(shared: Session) -> None:
    shared.submit(fakes.request(id="lines"))
    folder = ended(shared, "lines").folder
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "Result"
    assert [e["done"] for e in events if e.get("stage") == "denoise" and "done" in e] == [
        1,
        2,
        3,
        4,
    ]


def test_requests_run_one_after_another_in_order(shared: Session) -> None:
    order = []
    for id in ("one", "two", "three"):
        shared.submit(fakes.request(id=id))
    now = shared.snapshot()
    while len(order) < 3:
        running = [j.request.id for j in now.jobs if j.state == "running"]
        assert len(running) <= 1
        order += [id for id in running if id not in order]
        now = shared.wait(now.version, 5)
    assert order == ["one", "two", "three"]
    ended(shared, "three")


def test_the_version_changes_only_when_something_does(shared: Session) -> None:
    until(shared, lambda now: now.engine == "ready")
    version = shared.snapshot().version
    assert shared.wait(version, 0.1).version == version
    shared.submit(fakes.request(id="version"))
    assert shared.snapshot().version > version
    ended(shared, "version")


def test_a_running_request_can_be_cancelled_and_the_next_one_runs(shared: Session) -> None:
    shared.submit(fakes.request("slow", id="stop", steps=50))
    until(shared, lambda now: bool((j := now.job("stop")) and j.done == 1))
    shared.cancel("stop")
    assert ended(shared, "stop").state == "cancelled"
    shared.submit(fakes.request(id="after"))
    assert ended(shared, "after").state == "done"


def test_a_waiting_request_can_be_cancelled_and_never_runs(shared: Session) -> None:
    shared.submit(fakes.request("slow", id="first"))
    shared.submit(fakes.request(id="second"))
    shared.cancel("second")
    ended(shared, "first")
    job = ended(shared, "second")
    assert job.state == "cancelled" and not job.folder.exists()


def test_a_cancel_in_the_same_breath_as_the_submit_is_not_lost(shared: Session) -> None:
    for n in range(5):
        shared.submit(fakes.request("slow", id=f"quick{n}", steps=20))
        time.sleep(0.003 * n)
        shared.cancel(f"quick{n}")
        assert ended(shared, f"quick{n}").state == "cancelled"


def test_a_failed_request_tells_stage_and_reason_and_the_engine_stays(shared: Session) -> None:
    shared.submit(fakes.request("fail", id="bad"))
    job = ended(shared, "bad")
    assert job.state == "failed" and isinstance(job.last, Failure)
    assert "non-finite" in job.last.reason
    assert (
        json.loads((job.folder / "run.json").read_text())["failure"]["stage"] == "denoise, step 2"
    )
    assert until(shared, lambda now: now.engine == "ready").reason == ""


def test_too_many_waiting_requests_are_refused(shared: Session) -> None:
    shared.submit(fakes.request("slow", id="long", steps=50))
    until(shared, lambda now: bool((j := now.job("long")) and j.state == "running"))
    for n in range(MAX_WAITING):
        shared.submit(fakes.request(id=f"wait{n}"))
    with pytest.raises(ValueError, match="8 requests are waiting already; wait for one"):
        shared.submit(fakes.request(id="over"))
    for n in range(MAX_WAITING):
        shared.cancel(f"wait{n}")
    shared.cancel("long")
    ended(shared, "long")


def test_a_bad_request_is_refused_before_it_is_queued(shared: Session, tmp_path: Path) -> None:
    fake = tmp_path / "text.png"
    fake.write_text("not a picture")
    reference = Reference(kind="image", path=fake)
    with pytest.raises(ValueError, match=r"text\.png"):
        shared.submit(fakes.request(id="refused", references=(reference,)))
    assert shared.snapshot().job("refused") is None


def test_a_killed_engine_interrupts_the_job_and_the_next_one_restarts_it(own: Session) -> None:
    own.submit(fakes.request("slow", id="killed"))
    now = until(own, lambda now: bool((j := now.job("killed")) and j.done == 2))
    assert now.ready is not None
    os.kill(int(now.ready.resolved["pid"]), signal.SIGKILL)
    job = ended(own, "killed")
    assert job.state == "interrupted" and isinstance(job.last, Failure)
    assert job.last.reason.startswith("rank 0 died (exit code -9")
    assert json.loads((job.folder / "run.json").read_text())["state"] == "interrupted"
    own.submit(fakes.request(id="next"))
    assert ended(own, "next").state == "done"


def test_an_engine_that_cannot_load_fails_the_request_with_its_reason(tmp_path: Path) -> None:
    plan = replace(demo_plan(), name="broken")
    with Session(plan, root=tmp_path, families=fakes.FAMILIES) as session:
        session.submit(fakes.request(id="r"))
        job = ended(session, "r")
        assert job.state == "failed" and isinstance(job.last, Failure)
        assert job.last.reason.startswith("dit.safetensors is truncated")
        assert session.snapshot().engine == "failed"


def test_closing_ends_the_rank_and_cancels_what_runs(tmp_path: Path) -> None:
    session = Session(demo_plan(), root=tmp_path, families=fakes.FAMILIES)
    session.submit(fakes.request("slow", id="open", steps=50))
    now = until(session, lambda now: bool((j := now.job("open")) and j.done == 1))
    assert now.ready is not None
    session.close()
    session.close()
    assert not psutil.pid_exists(int(now.ready.resolved["pid"]))
    assert session.snapshot().engine == "closed"
    with pytest.raises(ValueError, match="the console is closing"):
        session.submit(fakes.request(id="late"))
