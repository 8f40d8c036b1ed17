"""The job store: order, claims, what survives a kill, and what it refuses."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.database import Database
from app.errors import Missing, WrongState
from app.job import SCHEMA, TABLES
from app.jobs import Job, JobStore
from runtime.messages import Reference
from tests import fakes


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[JobStore]:
    store = JobStore(tmp_path)
    yield store
    store.close()


def job(id: str, **fields: Any) -> Job:
    prompt = fields.pop("prompt", "a calm sea")
    plain: dict[str, Any] = {"kind": "generate", "owner": "local", "plan": fakes.plan()}
    plain |= {"request": fakes.request(prompt, id=id), "task": {}, "created": 1.0}
    return Job(id=id, **(plain | fields))


def order(jobs: JobStore) -> list[str]:
    return [job.id for job in jobs.queue()]


def test_a_job_is_read_back_as_it_was_put_in(tmp_path: Path) -> None:
    references = (
        Reference(kind="image", path=Path("/a/ü.png")),
        Reference(kind="video", path=Path("/a/b.mp4"), soundtrack=Path("/a/c.wav")),
    )
    request = fakes.request('say "hi" & wait', id="a", references=references, seed=2**64 - 1)
    plan = replace(fakes.plan(), threads=3)
    put = job("a", request=request, plan=plan, group="g", parent="p", keep_latents=False)
    first = JobStore(tmp_path)
    (added,) = first.add(put, job("b", kind="parity", request=None, task={"goldens": ["x"]}))[:1]
    first.close()
    second = JobStore(tmp_path)
    assert second.get("a") == added == replace(put, position=1.0)
    parity = second.get("b")
    assert parity is not None and parity.request is None and parity.task == {"goldens": ["x"]}
    second.close()


def test_jobs_are_claimed_in_order_and_once(jobs: JobStore) -> None:
    jobs.add(job("a"), job("b"))
    jobs.add(job("c"))
    claimed = [jobs.claim() for _ in range(4)]
    assert [j and j.id for j in claimed] == ["a", "b", "c", None]
    assert claimed[0] is not None and claimed[0].state == "running" and claimed[0].started > 0


def test_threads_that_claim_at_once_never_get_the_same_job(jobs: JobStore) -> None:
    jobs.add(*(job(f"j{n}") for n in range(40)))
    got: list[str] = []

    def work() -> None:
        while (claimed := jobs.claim()) is not None:
            got.append(claimed.id)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(f"j{n}" for n in range(40))


def test_a_job_moves_before_another_or_to_the_end(jobs: JobStore) -> None:
    jobs.add(*(job(id) for id in "abcd"))
    jobs.move("d", "a")
    assert order(jobs) == ["d", "a", "b", "c"]
    jobs.move("d", None)
    assert order(jobs) == ["a", "b", "c", "d"]
    jobs.move("b", "d")
    assert order(jobs) == ["a", "c", "b", "d"]
    jobs.move("b", "b")
    assert order(jobs) == ["a", "c", "b", "d"]


def test_the_only_job_may_be_moved_to_the_end(jobs: JobStore) -> None:
    jobs.add(job("a"))
    jobs.move("a", None)
    assert order(jobs) == ["a"]


def test_two_hundred_moves_into_the_same_gap_keep_the_order(jobs: JobStore) -> None:
    jobs.add(*(job(id) for id in "abc"))
    for _ in range(100):  # a float's mantissa has room for 52 halvings
        jobs.move("c", "b")
        jobs.move("b", "c")
    assert order(jobs) == ["a", "b", "c"]
    assert len({j.position for j in jobs.queue()}) == 3


def test_a_user_moves_among_the_own_jobs_and_overtakes_nobody(jobs: JobStore) -> None:
    jobs.add(job("m1", owner="mia"), job("x"), job("m2", owner="mia"), job("m3", owner="mia"))
    jobs.move("m3", "m1", owner="mia")
    assert order(jobs) == ["m3", "x", "m1", "m2"]
    with pytest.raises(WrongState, match="does not wait in your queue"):
        jobs.move("m3", "x", owner="mia")


def test_a_running_job_is_neither_moved_nor_edited_nor_removed(jobs: JobStore) -> None:
    jobs.add(job("a"), job("b"))
    jobs.claim()
    with pytest.raises(WrongState, match="does not wait"):
        jobs.move("a", "b")
    with pytest.raises(WrongState, match="is running; only a waiting job can be edited"):
        jobs.edit("a", request=fakes.request(id="a"))
    with pytest.raises(WrongState, match="cancel it before it is deleted"):
        jobs.remove("a")


def test_a_waiting_job_takes_another_request_and_plan(jobs: JobStore) -> None:
    jobs.add(job("a"))
    request, plan = fakes.request("rain", id="a", steps=9), fakes.plan("other")
    assert jobs.edit("a", request=request, plan=plan).request == request
    assert [j.plan.name for j in jobs.list(text="rain", plan="other")] == ["other"]


def test_a_paused_queue_gives_nothing_also_after_a_restart(tmp_path: Path) -> None:
    first = JobStore(tmp_path)
    first.add(job("a"))
    first.paused = True
    first.close()
    second = JobStore(tmp_path)
    assert second.paused and second.claim() is None
    second.paused = False
    assert second.claim() is not None
    second.close()


def test_a_change_only_in_one_state_tells_whether_it_was_made(jobs: JobStore) -> None:
    jobs.add(job("a"))
    assert not jobs.update("a", only=("running",), state="done")
    assert jobs.update("a", only=("queued",), state="cancelled")
    assert jobs.need("a").state == "cancelled"


def test_progress_is_told_until_the_job_has_ended(jobs: JobStore) -> None:
    jobs.add(job("a"))
    jobs.claim()
    jobs.progress("a", "denoise", 3, 12)
    assert (jobs.need("a").stage, jobs.queue()[0].done) == ("denoise", 3)
    jobs.update("a", state="done", stage="", done=12, total=12)
    assert (jobs.need("a").stage, jobs.need("a").done) == ("", 12)


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({}, "dcba"),
        ({"states": ("done", "failed")}, "cb"),
        ({"kinds": ("parity",)}, "d"),
        ({"owner": "mia"}, "b"),
        ({"text": "GULL"}, "c"),
        ({"text": "100%"}, "a"),
        ({"text": "%"}, "a"),
        ({"text": "_"}, ""),
        ({"limit": 2}, "dc"),
        ({"before": "c"}, "ba"),
        ({"since": 3.0}, "dc"),
        ({"until": 3.0}, "ba"),
        ({"plan": "other"}, "d"),
    ],
)
def test_lists_are_newest_first_and_filtered(
    jobs: JobStore, filters: dict[str, Any], found: str
) -> None:
    jobs.add(job("a", prompt="100% sea"), job("b", owner="mia", created=2.0))
    jobs.add(job("c", prompt="one gull", created=3.0))
    parity = {"kind": "parity", "request": None, "plan": fakes.plan("other")}
    jobs.add(job("d", created=4.0, **parity))
    jobs.update("b", state="done")
    jobs.update("c", state="failed")
    assert "".join(j.id for j in jobs.list(**filters)) == found


def test_halves_made_in_the_same_instant_are_paged_without_loss(jobs: JobStore) -> None:
    jobs.add(*(job(id) for id in "abcde"))
    pages, before = [], None
    while page := jobs.list(limit=2, before=before):
        pages += [j.id for j in page]
        before = page[-1].id
    assert pages == list("edcba")


def test_an_unknown_job_is_missing(jobs: JobStore) -> None:
    assert jobs.get("nobody") is None
    for act in (lambda: jobs.need("x"), lambda: jobs.remove("x"), lambda: jobs.move("x", None)):
        with pytest.raises(Missing, match="there is no job 'x'"):
            act()


def test_two_jobs_of_one_id_are_refused_and_none_of_them_is_kept(jobs: JobStore) -> None:
    jobs.add(job("a"))
    with pytest.raises(sqlite3.IntegrityError):
        jobs.add(job("b"), job("a"))
    assert order(jobs) == ["a"]


def test_two_consoles_never_share_a_folder(tmp_path: Path) -> None:
    first = JobStore(tmp_path)
    with pytest.raises(ValueError, match=rf"another console \(process {os.getpid()}\) uses"):
        JobStore(tmp_path)
    first.close()
    JobStore(tmp_path).close()


def test_another_schema_is_refused_in_a_sentence(tmp_path: Path) -> None:
    JobStore(tmp_path).close()
    with sqlite3.connect(tmp_path / "console.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ValueError, match=r"another version of the console \(schema 99, this"):
        JobStore(tmp_path)


def test_a_damaged_file_is_refused_and_the_folder_is_free_again(tmp_path: Path) -> None:
    (tmp_path / "console.sqlite3").write_bytes(b"this is no database" * 100)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot be used .* move it away"):
            JobStore(tmp_path)


def test_a_damaged_page_is_found_at_the_start_and_told_in_one_line(tmp_path: Path) -> None:
    with JobStore(tmp_path) as jobs:
        jobs.add(*(job(f"j{n}") for n in range(20)))
    with (tmp_path / "console.sqlite3").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 2000)
    with pytest.raises(ValueError, match=r"^.*cannot be used .* move it away.*$"):
        JobStore(tmp_path)


def raise_malformed(db: Database) -> None:
    with db.writing():
        raise sqlite3.DatabaseError("database disk image is malformed")


def test_a_file_that_is_damaged_while_it_is_used_is_an_os_error(tmp_path: Path) -> None:
    with closing(Database(tmp_path, tables=TABLES, schema=SCHEMA)) as db:
        with pytest.raises(OSError, match=r"console.sqlite3 cannot be used: .*malformed"):
            raise_malformed(db)
        with pytest.raises(OSError, match="cannot be used: no such table"):
            db.rows("SELECT * FROM elsewhere")


def write_until_killed(root: Path, pipe: Any) -> None:
    store = JobStore(root)
    for n in range(10_000):
        store.add(job(f"j{n:05}"))
        pipe.send(n)


@pytest.mark.parametrize("_", range(3))
def test_what_was_added_before_a_kill_is_there_and_the_folder_is_free(
    tmp_path: Path, _: int
) -> None:
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=write_until_killed, args=(tmp_path, theirs))
    process.start()
    assert ours.poll(30)
    while ours.recv() < 20:
        pass
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    told = 20
    theirs.close()
    while ours.poll():
        try:
            told = ours.recv()
        except EOFError:
            break
    store = JobStore(tmp_path)
    ids = order(store)
    store.close()
    assert ids == [f"j{n:05}" for n in range(len(ids))] and len(ids) >= told + 1
