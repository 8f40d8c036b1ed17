"""The session over a real engine with the fake family: queue, states, deaths, run folders."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from app import presets
from app.console import Console
from app.errors import Missing, TooMany, WrongState
from app.jobs import Job, JobStore
from app.live import Live
from app.runs import Run
from app.session import MOST_OF_ONE
from runtime.engine import Engine
from runtime.media.files import DiskFullError
from runtime.messages import Event, Plan, Ref2VARequest, Reference
from tests import fakes
from tests.consoles import at_step, demo_plan, ended, fake_console, until

T = TypeVar("T")

PLAN = demo_plan()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with fake_console(tmp_path_factory.mktemp("runs")) as console:
        yield console


@pytest.fixture
def own(shared: Console) -> Iterator[Console]:
    """The shared console for a test that pauses, kills or fills it; left as it was found."""
    until(lambda: not shared.jobs.queue())
    yield shared
    shared.session.pause(False)
    for job in shared.jobs.queue():
        shared.session.cancel(job.id)
    until(lambda: not shared.jobs.queue())


def put(console: Console, prompt: str = "a calm sea", plan: Plan = PLAN, **fields: Any) -> Job:
    """One job in the queue."""
    return console.session.enqueue("local", fakes.request(prompt, **fields), (plan,))[0]


def engine_pid(console: Console) -> int:
    ready = until(lambda: console.session.engine_state().ready)
    return int(ready.resolved["pid"])


def record(console: Console, id: str) -> dict[str, Any]:
    text = (console.root / id / "run.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


# ---- a run and its folder


def test_a_request_ends_with_a_video_and_a_complete_run_folder(shared: Console) -> None:
    job = ended(shared, put(shared).id)
    assert job.state == "done" and job.reason == "" and job.created <= job.started <= job.ended
    names = {path.name for path in (shared.root / job.id).iterdir()}
    assert names == {
        "request.toml",
        "plan.toml",
        "events.jsonl",
        "run.json",
        "result.json",
        "result.mp4",
        "preview.webp",
        "telemetry.jsonl",
    }
    written = record(shared, job.id)
    assert written["state"] == "done" and written["engine"]["resolved"]["plan"] == "cpu"
    assert written["notes"][0]["text"] == "0 references"
    assert written["stages"][-1]["stage"] == "end to end"


def test_the_sidecar_says_what_the_mp4_carries(shared: Console) -> None:
    job = ended(shared, put(shared, "sidecar").id)
    sidecar = json.loads((shared.root / job.id / "result.json").read_text(encoding="utf-8"))
    assert set(sidecar) == {"request", "plan", "resolved", "notes"}
    assert sidecar["request"]["prompt"] == "sidecar" and sidecar["request"]["id"] == job.id
    assert sidecar["resolved"]["plan"] == "cpu" and sidecar["notes"][0] == "0 references"


def test_the_written_request_can_be_run_again(shared: Console) -> None:
    job = ended(shared, put(shared, 'again "quoted"').id)
    folder = shared.root / job.id
    assert presets.load_request(folder / "request.toml", id=job.id) == job.request
    assert presets.load_plan(folder / "plan.toml") == PLAN


def test_events_are_lines_in_the_order_they_came(shared: Console) -> None:
    job = ended(shared, put(shared).id)
    lines = (shared.root / job.id / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert (events[0]["event"], events[-1]["event"]) == ("Ready", "Result")
    steps = [e["done"] for e in events if e["event"] == "Progress" and e["stage"] == "denoise"]
    assert steps == [1, 2, 3, 4]


def test_telemetry_of_the_run_has_its_marks(shared: Console) -> None:
    job = ended(shared, put(shared).id)
    text = (shared.root / job.id / "telemetry.jsonl").read_text()
    marks = [line for line in map(json.loads, text.splitlines()) if "mark" in line]
    assert [mark["mark"] for mark in marks if mark["kind"] == "stage"] == ["text encode", "denoise"]


def test_latents_that_are_not_kept_go_once_the_mp4_is_written(shared: Console) -> None:
    def run(keep: bool) -> Job:
        request = fakes.request("latents")
        jobs = shared.session.enqueue("local", request, (PLAN,), keep_latents=keep)
        return ended(shared, jobs[0].id)

    kept, dropped = run(True), run(False)
    assert (shared.root / kept.id / "latents.safetensors").is_file()
    assert not (shared.root / dropped.id / "latents.safetensors").exists()
    assert (shared.root / dropped.id / "result.mp4").is_file()
    written = record(shared, dropped.id)
    assert written["result"]["latents"] is None
    assert written["notes"][-1]["text"] == "latents removed once the mp4 was written"


# ---- the queue


def test_fifty_jobs_of_five_clients_at_once_all_end_in_order_and_run_once(own: Console) -> None:
    def client(name: str) -> None:
        for n in range(10):
            request = fakes.request(f"{name} {n}", steps=1, frames=5, width=32, height=32)
            own.session.enqueue(name, request, (PLAN,))

    threads = [threading.Thread(target=client, args=(f"u{n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not own.jobs.queue(), 120)
    made = [own.jobs.list(owner=f"u{n}") for n in range(5)]
    jobs = sorted(itertools.chain(*made), key=lambda job: job.position)
    assert len(jobs) == 50 and {job.state for job in jobs} == {"done"}
    times = [(job.started, job.ended) for job in jobs]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    for job in jobs:
        events = (own.root / job.id / "events.jsonl").read_text()
        assert events.count('"event": "Result"') == 1


def test_a_b_halves_run_one_after_the_other_on_their_plans(shared: Console) -> None:
    plans = (PLAN, demo_plan("other"))
    halves = shared.session.enqueue("local", fakes.request("slow", steps=1), plans)
    assert halves[0].group == halves[1].group != ""
    assert halves[1].position == halves[0].position + 1
    for half, plan in zip(halves, ("cpu", "other"), strict=True):
        assert ended(shared, half.id).state == "done"
        assert record(shared, half.id)["engine"]["resolved"]["plan"] == plan
    put(shared)


def test_a_paused_queue_finishes_what_runs_and_begins_nothing(own: Console) -> None:
    first, second = put(own, "slow", steps=2), put(own)
    at_step(own, first.id, 1)
    own.session.pause(True)
    assert ended(own, first.id).state == "done"
    time.sleep(0.3)
    assert own.jobs.need(second.id).state == "queued"
    own.session.pause(False)
    assert ended(own, second.id).state == "done"


def test_a_waiting_job_can_be_edited_moved_and_duplicated(own: Console) -> None:
    own.session.pause(True)
    first, second = put(own), put(own)
    edited = own.session.edit(second.id, request=fakes.request("rain", id="x"))
    assert edited.request is not None
    assert (edited.request.prompt, edited.request.id) == ("rain", second.id)
    own.session.move(second.id, first.id)
    copy = own.session.duplicate(second.id)
    assert (copy.parent, copy.attempt) == (second.id, 1) and copy.request is not None
    assert [job.id for job in own.jobs.queue()] == [second.id, first.id, copy.id]
    own.session.pause(False)
    assert ended(own, copy.id).state == "done"
    assert record(own, second.id)["request"]["prompt"] == "rain"


def test_a_running_request_can_be_cancelled_and_the_next_one_runs(shared: Console) -> None:
    slow = put(shared, "slow", steps=50)
    at_step(shared, slow.id, 1)
    began = time.monotonic()
    assert shared.session.cancel(slow.id).state in ("cancelling", "cancelled")
    job = ended(shared, slow.id)
    assert time.monotonic() - began < 1.5  # one step takes half a second
    assert (job.state, job.reason) == ("cancelled", "") and job.done < 5
    assert ended(shared, put(shared).id).state == "done"


def test_a_waiting_request_can_be_cancelled_and_never_runs(shared: Console) -> None:
    slow, waiting = put(shared, "slow", steps=2), put(shared)
    assert shared.session.cancel(waiting.id).state == "cancelled"
    ended(shared, slow.id)
    assert not (shared.root / waiting.id).exists()
    with pytest.raises(WrongState, match="is cancelled already"):
        shared.session.cancel(waiting.id)


def test_a_cancel_in_the_same_breath_as_the_start_is_not_lost(shared: Console) -> None:
    for n in range(5):
        job = put(shared, "slow", steps=20)
        time.sleep(0.003 * n)
        shared.session.cancel(job.id)
        assert ended(shared, job.id).state == "cancelled"


def test_a_cancel_while_the_plan_loads_ends_the_load_at_once(own: Console) -> None:
    job = put(own, plan=demo_plan("long load"))
    until(lambda: own.session.engine_state().stage == "load")
    own.session.cancel(job.id)
    assert ended(own, job.id, 5).state == "cancelled"
    assert record(own, job.id)["failure"]["stage"] == "load"
    assert ended(own, put(own).id).state == "done"


def test_a_cancel_while_the_engine_before_is_still_ended_ends_the_load_too(own: Console) -> None:
    ended(own, put(own).id)
    until(lambda: own.session.engine_state().state == "ready")
    job = put(own, plan=demo_plan("long load"))
    until(lambda: own.jobs.need(job.id).state == "running")
    assert own.session.engine_state().state == "ready"  # of the plan before
    own.session.cancel(job.id)
    assert ended(own, job.id, 45).state == "cancelled"


# ---- failures


def test_a_failed_request_tells_stage_and_reason_and_the_engine_stays(shared: Console) -> None:
    ended(shared, put(shared).id)  # the test before may have left no engine
    pid = engine_pid(shared)
    job = ended(shared, put(shared, "fail").id)
    assert job.state == "failed" and "non-finite" in job.reason
    assert record(shared, job.id)["failure"]["stage"] == "denoise, step 2"
    assert ended(shared, put(shared).id).state == "done" and engine_pid(shared) == pid


def test_a_killed_engine_interrupts_its_job_and_the_next_one_starts_it_again(own: Console) -> None:
    job, waiting = put(own, "slow"), put(own)
    at_step(own, job.id, 2)
    os.kill(engine_pid(own), signal.SIGKILL)
    killed = ended(own, job.id)
    assert killed.state == "interrupted"
    assert killed.reason.startswith("rank 0 died (exit code -9")
    assert (killed.stage, killed.done, killed.total) == ("denoise", 2, 4)
    assert record(own, job.id)["state"] == "interrupted"
    assert ended(own, waiting.id).state == "done"


def test_an_interrupted_job_is_run_anew_only_when_asked(own: Console) -> None:
    job = put(own, "slow")
    at_step(own, job.id, 1)
    os.kill(engine_pid(own), signal.SIGKILL)
    ended(own, job.id)
    assert own.jobs.queue() == ()  # nothing is retried by itself
    again = own.session.retry(job.id)
    assert (again.parent, again.attempt) == (job.id, 2) and again.id != job.id
    assert again.request == replace(job.request or fakes.request(), id=again.id)
    assert ended(own, again.id).state == "done"
    with pytest.raises(WrongState, match="is done; duplicate it"):
        own.session.retry(again.id)


def test_an_engine_that_dies_idle_is_noticed_and_started_again(own: Console) -> None:
    ended(own, put(own).id)
    until(lambda: own.session.engine_state().state == "ready")
    os.kill(engine_pid(own), signal.SIGKILL)
    status = until(lambda: s if (s := own.session.engine_state()).state == "failed" else None)
    assert "died while nothing ran" in status.reason
    assert ended(own, put(own).id).state == "done"


def test_a_plan_that_cannot_load_fails_only_its_job(own: Console) -> None:
    bad, good = put(own, plan=demo_plan("broken")), put(own)
    job = ended(own, bad.id)
    assert job.state == "failed" and job.reason.startswith("dit.safetensors is truncated")
    assert record(own, job.id)["failure"]["stage"] == "load"
    assert ended(own, good.id).state == "done"


def test_an_engine_whose_process_cannot_be_made_fails_its_job_and_the_queue_goes_on(
    own: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(_: Engine) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_spawn", no_process)
        job = ended(own, put(own, plan=demo_plan("another")).id)
        assert job.state == "failed" and "the engine cannot be started" in job.reason
        assert own.session.engine_state().state == "failed"
    assert ended(own, put(own).id).state == "done"


def test_a_run_folder_that_cannot_be_made_fails_the_job_and_the_queue_goes_on(
    own: Console,
) -> None:
    own.session.pause(True)
    blocked, good = put(own), put(own)
    (own.root / blocked.id).write_text("in the way")
    own.session.pause(False)
    job = ended(own, blocked.id)
    assert job.state == "failed" and blocked.id in job.reason
    assert ended(own, good.id).state == "done"


def test_a_full_disk_holds_the_queue_says_so_and_goes_on_once_there_is_room(
    own: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    update, claim = own.jobs.update, own.jobs.claim

    def no_room(write: Callable[..., T], *args: Any, **changes: Any) -> T:
        if full.is_set():
            raise DiskFullError(own.root / "console.sqlite3")
        return write(*args, **changes)

    monkeypatch.setattr(own.jobs, "update", partial(no_room, update))
    monkeypatch.setattr(own.jobs, "claim", partial(no_room, claim))
    first, second = put(own, "slow", steps=2), put(own)
    at_step(own, first.id, 1)
    full.set()
    until(lambda: "no space left" in own.session.engine_state().reason)
    assert own.jobs.need(first.id).state == "running"
    full.clear()
    assert ended(own, second.id).state == ended(own, first.id).state == "done"
    assert own.session.engine_state().reason == ""


def test_a_disk_that_fills_up_while_a_job_runs_is_told_in_a_sentence(
    own: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "add", no_room)
        job = ended(own, put(own).id)
    assert job.state == "failed"
    assert job.reason.startswith(f"no space left to write {own.root / job.id}: its disk has")
    assert ended(own, put(own).id).state == "done"


def test_a_fault_of_ours_in_one_job_does_not_end_the_queue(
    own: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.session.pause(True)
    first, second = put(own), put(own)
    add = Run.add

    def faulty(run: Run, event: Event) -> None:
        if run.folder.name == first.id:
            raise RuntimeError("a fault\nin many lines")
        add(run, event)

    monkeypatch.setattr(Run, "add", faulty)
    own.session.pause(False)
    job = ended(own, first.id)
    assert job.state == "failed" and job.reason == "the console failed: RuntimeError: a fault"
    assert ended(own, second.id).state == "done"


def test_a_job_that_cannot_be_told_silences_no_other(
    own: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.session.pause(True)
    first, second = put(own), put(own)
    told, live = set(), own.session.live

    def faulty(id: str) -> Live | None:
        if id == first.id:
            raise RuntimeError("a fault")
        told.add(id)
        return live(id)

    monkeypatch.setattr(own.session, "live", faulty)
    own.session.cancel(first.id)
    own.session.cancel(second.id)
    until(lambda: second.id in told, 10)


# ---- refusals


def test_too_many_waiting_jobs_of_one_user_are_refused(own: Console) -> None:
    own.session.pause(True)
    for _ in range(MOST_OF_ONE):
        own.session.enqueue("mia", fakes.request(), (PLAN,))
    with pytest.raises(TooMany, match="100 of your jobs wait already and at most 100 may"):
        own.session.enqueue("mia", fakes.request(), (PLAN,))
    own.session.enqueue("tom", fakes.request(), (PLAN,))
    assert own.jobs.waiting("mia") == 100


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "x" * 7001}, "may have 7,000 characters, this one has 7,001; shorten it"),
        ({"negative_prompt": "x" * 7001}, "shorten it"),
        (
            {"references": (Reference(kind="image", path=Path("/nowhere.png")),)},
            "nowhere.png",
        ),
    ],
)
def test_a_bad_request_is_refused_before_it_is_queued(
    shared: Console, fields: dict[str, Any], words: str
) -> None:
    before = len(shared.jobs.list())
    request = Ref2VARequest(**({"id": "r", "prompt": "a"} | fields))
    with pytest.raises(ValueError, match=words):
        shared.session.enqueue("local", request, (PLAN,))
    assert len(shared.jobs.list()) == before


def test_a_missing_model_file_is_refused_before_it_is_queued(shared: Console) -> None:
    models = replace(PLAN.models, dit=Path("/nowhere.safetensors"))
    with pytest.raises(ValueError, match=r"needs /nowhere\.safetensors, which is not there"):
        put(shared, plan=replace(PLAN, models=models))


def test_unload_frees_the_engine_and_waits_for_no_running_job(own: Console) -> None:
    ended(own, put(own).id)
    pid = engine_pid(own)
    own.session.unload()
    until(lambda: own.session.engine_state().state == "unloaded")
    assert not psutil.pid_exists(pid)
    job = put(own, "slow")
    at_step(own, job.id, 1)
    with pytest.raises(WrongState, match="is running; wait for it or cancel it first"):
        own.session.unload()


def test_a_deleted_job_takes_its_folder_along_and_a_running_one_stays(own: Console) -> None:
    job = ended(own, put(own).id)
    own.session.remove(job.id)
    assert not (own.root / job.id).exists()
    with pytest.raises(Missing):
        own.jobs.need(job.id)
    slow = put(own, "slow")
    at_step(own, slow.id, 1)
    with pytest.raises(WrongState, match="cancel it before it is deleted"):
        own.session.remove(slow.id)


# ---- the end and the next start


def test_deleting_a_run_that_was_moved_and_linked_takes_the_link_only(
    own: Console, tmp_path: Path
) -> None:
    job = ended(own, put(own).id)
    moved = (own.root / job.id).rename(tmp_path / "moved")
    (own.root / job.id).symlink_to(moved)
    own.session.remove(job.id)
    assert own.jobs.get(job.id) is None and not (own.root / job.id).is_symlink()
    assert (moved / "result.mp4").is_file()


def test_closing_interrupts_what_runs_and_the_next_start_goes_on(tmp_path: Path) -> None:
    with fake_console(tmp_path) as first:
        running, waiting = put(first, "slow", steps=50), put(first)
        at_step(first, running.id, 1)
        pid = engine_pid(first)
    first.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(ValueError, match="the console is closing"):
        put(first)
    with fake_console(tmp_path) as second:
        job = second.jobs.need(running.id)
        assert job.state == "interrupted" and "the console was stopped" in job.reason
        assert ended(second, waiting.id).state == "done"


def test_runs_of_the_command_line_are_adopted_once(tmp_path: Path) -> None:
    with fake_console(tmp_path) as first:
        id = ended(first, put(first, "made elsewhere").id).id
    for name in ("console.sqlite3", "console.sqlite3-wal", "console.sqlite3-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with JobStore(tmp_path) as jobs:
        jobs.paused = True
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "run.json").write_text('{"state": "of something else"}')
    for _ in range(2):
        with fake_console(tmp_path) as console:
            (job,) = console.jobs.list()
            assert (job.id, job.state, job.owner) == (id, "done", "local")
            assert job.request is not None and job.request.prompt == "made elsewhere"
            waiting = put(console)  # of the adopted run's class, in a paused queue
            assert console.session.forecasts()[waiting.id].eta is not None
            console.session.remove(waiting.id)


def test_the_first_run_of_a_shape_tells_its_steps_from_the_second_on_and_no_whole(
    own: Console,
) -> None:
    job = put(own, "slow", steps=33)  # a number of steps that no other test runs
    assert own.session.forecast(at_step(own, job.id, 1)).eta is None
    at_step(own, job.id, 2)
    told = own.session.forecast(own.jobs.need(job.id))
    assert told.eta is None and told.denoise is not None and 2 < told.denoise < 30
    own.session.cancel(job.id)


def test_a_second_console_in_the_same_folder_is_refused(own: Console) -> None:
    with pytest.raises(ValueError, match="another console"):
        fake_console(own.root)
