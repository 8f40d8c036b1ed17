"""The routes of runs over a real console with the fake family: owners, files, timings, exports."""

from __future__ import annotations

import csv
import io
import json
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.testclient import TestClient

from app import presets, records
from app.access import User
from app.baselines import Baselines
from app.console import Console
from app.errors import Refused
from app.exports import timings_csv
from app.jobs import Job
from app.routes import runs
from tests import fakes

PARTS = ("video", "latents", "thumb", "preview", "timings", "timings.csv", "telemetry", "export")
PLAN = replace(presets.load_plan(presets.find("plans", "cpu")), family="fake")


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    root = tmp_path_factory.mktemp("runs")
    with Console(root, PLAN, families=fakes.FAMILIES) as console:
        yield console


def client(console: Console, name: str = "alice", *, admin: bool = False) -> TestClient:
    def refused(_: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 400
        return JSONResponse({"detail": str(error)}, status)

    app = FastAPI()
    app.include_router(runs.router(console, lambda: User(name=name, admin=admin)), prefix="/api/v1")
    app.add_exception_handler(ValueError, refused)
    return TestClient(app, base_url="http://127.0.0.1/api/v1")


def ended(console: Console, job: Job, seconds: float = 60.0) -> Job:
    deadline = time.monotonic() + seconds
    while not console.jobs.need(job.id).over:
        assert time.monotonic() < deadline, console.jobs.need(job.id)
        time.sleep(0.02)
    return console.jobs.need(job.id)


def made(console: Console, prompt: str = "a calm sea", owner: str = "alice") -> Job:
    (job,) = console.session.enqueue(owner, fakes.request(prompt), (PLAN,))
    return ended(console, job)


@pytest.fixture(scope="module")
def film(console: Console) -> Job:
    job = made(console)
    assert job.state == "done", job
    return job


@pytest.mark.parametrize(
    "path",
    ["", *(f"/{part}" for part in PARTS)],
)
def test_a_run_of_another_user_is_not_there(console: Console, film: Job, path: str) -> None:
    answer = client(console, "bob").get(f"/runs/{film.id}{path}")
    assert answer.status_code == 404
    assert "sea" not in answer.text


def test_another_user_can_neither_delete_nor_pin_nor_compare(console: Console, film: Job) -> None:
    bob = client(console, "bob")
    assert bob.delete(f"/runs/{film.id}").status_code == 404
    assert bob.put("/runs/baseline", json={"id": film.id}).status_code == 404
    assert bob.get(f"/runs/compare?a={film.id}&b={film.id}").status_code == 404
    assert bob.get(f"/runs?before={film.id}").status_code == 404
    assert console.jobs.need(film.id).state == "done"


def test_the_history_of_a_user_holds_own_runs_only(console: Console, film: Job) -> None:
    other = made(console, "a red boat", owner="carol")
    mine = [run["id"] for run in client(console).get("/runs").json()["runs"]]
    assert film.id in mine and other.id not in mine
    admin = [run["id"] for run in client(console, "root", admin=True).get("/runs").json()["runs"]]
    assert {film.id, other.id} <= set(admin)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("q=CALM", True),
        ("q=100%25", False),
        ("plan=cpu", True),
        ("plan=other", False),
        ("state=done,failed", True),
        ("state=queued", False),
        ("kind=parity", False),
        ("from=4000000000", False),
        ("to=1", False),
    ],
)
def test_a_filter_narrows_the_history(console: Console, film: Job, query: str, found: bool) -> None:
    shown = [run["id"] for run in client(console).get(f"/runs?{query}").json()["runs"]]
    assert (film.id in shown) is found


def test_a_search_of_any_length_is_answered_with_a_sentence(console: Console, film: Job) -> None:
    answer = client(console).get("/runs", params={"q": "a" * 50_001})
    assert answer.status_code in (400, 422) and "500 characters" in answer.text


def test_a_page_of_the_history_goes_on_after_its_last_run(console: Console, film: Job) -> None:
    newer = made(console, "paging")
    alice = client(console)
    first = alice.get("/runs?limit=1").json()
    assert [run["id"] for run in first["runs"]] == [newer.id] and first["more"]
    second = alice.get(f"/runs?limit=200&before={newer.id}").json()
    assert newer.id not in {run["id"] for run in second["runs"]}
    assert film.id in {run["id"] for run in second["runs"]} and not second["more"]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("state=gone", "state must be of queued, running"),
        ("kind=x", "kind must be of generate, parity, got 'x'"),
    ],
)
def test_an_unknown_filter_is_one_sentence(console: Console, query: str, sentence: str) -> None:
    answer = client(console).get(f"/runs?{query}")
    assert answer.status_code == 400
    assert sentence in answer.json()["detail"]


def test_the_video_comes_in_ranges(console: Console, film: Job) -> None:
    part = client(console).get(f"/runs/{film.id}/video", headers={"Range": "bytes=0-99"})
    assert (part.status_code, len(part.content)) == (206, 100)
    assert part.headers["content-type"] == "video/mp4"


def test_the_thumbnail_is_made_once_by_a_child(console: Console, film: Job) -> None:
    alice = client(console)
    first = alice.get(f"/runs/{film.id}/thumb")
    assert first.headers["content-type"] == "image/webp"
    assert first.content[:4] == b"RIFF"
    kept = console.root / film.id / records.THUMB
    made_at = kept.stat().st_mtime_ns
    assert alice.get(f"/runs/{film.id}/thumb").content == first.content
    assert kept.stat().st_mtime_ns == made_at


def test_what_a_run_does_not_have_is_named(console: Console, film: Job) -> None:
    answer = client(console).get(f"/runs/{film.id}/latents")
    assert answer.status_code == 404
    assert answer.json()["detail"] == f"run {film.id} has no latents; it is done"


@pytest.mark.parametrize("id", ["..", "%2e%2e", "..%2fmedia", "%2fetc", "film%00", "media"])
def test_an_id_that_is_none_of_the_store_leads_nowhere(console: Console, id: str) -> None:
    assert client(console, admin=True).get(f"/runs/{id}/video").status_code == 404


def test_a_link_out_of_the_run_folder_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(b"x")
    folder = tmp_path / "root" / "run"
    folder.mkdir(parents=True)
    (folder / records.VIDEO).symlink_to(secret)
    assert records.inside(tmp_path / "root", "run", records.VIDEO) is None
    (tmp_path / "root" / "linked").symlink_to(tmp_path)
    assert records.inside(tmp_path / "root", "linked") is None
    assert records.inside(tmp_path / "root", "..") is None


def test_timings_have_the_standard_columns_and_say_what_was_not_measured(
    console: Console, film: Job
) -> None:
    found = client(console).get(f"/runs/{film.id}/timings").json()
    columns = dict(found["columns"])
    assert list(columns)[:2] == ["load", "text encode"]
    assert columns["per step"] > 0 and columns["per step: attention"] > 0
    assert columns["video VAE decode"] is None  # the fake has none
    assert found["load_seconds"] == columns["load"] == 0.1
    assert found["shape"]["width"] == 64 and found["conditions"]["attention"]
    assert not found["live"]
    steps = [s for s in found["stages"] if s["stage"] == "denoise"]
    assert [s["step"] for s in steps] == [0, 1, 2, 3]
    assert all(a["start"] < b["start"] for a, b in pairwise(steps))


def test_timings_name_the_checkpoints_but_not_their_folders(console: Console, film: Job) -> None:
    """Two runs of one plan may have had other files; then their times are no comparison."""
    found = client(console).get(f"/runs/{film.id}/timings").json()
    assert found["conditions"]["dit"] == PLAN.models.dit.name
    assert str(PLAN.models.dit.parent) not in json.dumps(found)


def test_timings_of_a_running_job_grow(console: Console) -> None:
    (job,) = console.session.enqueue("alice", fakes.request("slow", steps=8), (PLAN,))
    alice = client(console)
    counts = set()
    while not console.jobs.need(job.id).over:
        found = alice.get(f"/runs/{job.id}/timings").json()
        if found["live"]:
            counts.add(sum(s["stage"] == "denoise" for s in found["stages"]))
        time.sleep(0.1)
    assert len(counts) > 3
    assert console.jobs.need(job.id).state == "done"


def test_the_csv_has_every_column_and_stage(console: Console, film: Job) -> None:
    alice = client(console)
    answer = alice.get(f"/runs/{film.id}/timings.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    found = alice.get(f"/runs/{film.id}/timings").json()
    assert len(rows) == len(found["columns"]) + len(found["stages"])
    blank = {row["stage"] for row in rows if row["seconds"] == ""}
    assert blank == {name for name, seconds in found["columns"] if seconds is None}


def test_the_csv_tells_peaks_and_no_start_of_what_is_a_sum() -> None:
    whole = {"stage": "denoise", "rank": 0, "step": 0, "start": 0.5, "seconds": 2.0}
    stages = [
        {**whole, "peak_bytes": 7},
        {**whole, "stage": "attention", "seconds": 1.5, "peak_bytes": None},
    ]
    timings = {"id": "run", "plan": "cpu", "columns": [], "stages": stages}
    step, part = csv.DictReader(io.StringIO(timings_csv(timings)))
    names = ("step_index", "start_seconds", "seconds", "peak_bytes")
    assert [step[name] for name in names] == ["0", "0.5", "2.0", "7"]
    assert [part[name] for name in names] == ["0", "", "1.5", ""]


def test_no_cell_of_the_csv_is_a_formula() -> None:
    timings = {"id": "run", "plan": "=cmd()", "columns": [("load", None)], "stages": []}
    assert "'=cmd()" in timings_csv(timings)


def test_the_export_holds_the_whole_run(console: Console, film: Job) -> None:
    answer = client(console, "root", admin=True).get(f"/runs/{film.id}/export")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        names = {name.removeprefix(f"{film.id}/") for name in archive.namelist()}
        video = archive.read(f"{film.id}/{records.VIDEO}")
    expected = {"request.toml", "plan.toml", "events.jsonl", "run.json", "timings.csv"}
    assert expected | {records.VIDEO} <= names
    assert video == (console.root / film.id / records.VIDEO).read_bytes()


def test_users_who_are_no_admin_do_not_learn_folders(console: Console, film: Job) -> None:
    alice = client(console)
    folder = str(PLAN.models.dit.parent)
    assert folder in client(console, admin=True).get(f"/runs/{film.id}").text
    assert folder not in alice.get(f"/runs/{film.id}").text
    content = alice.get(f"/runs/{film.id}/export").content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            assert folder.encode() not in archive.read(name), name
            assert str(console.root).encode() not in archive.read(name), name


def test_a_failed_run_tells_its_reason(console: Console) -> None:
    job = made(console, "fail")
    found = client(console).get(f"/runs/{job.id}").json()
    assert found["state"] == "failed"
    assert "non-finite" in found["failure"]["reason"] and found["failure"]["details"] == ""


def test_a_run_that_waits_has_a_record_without_a_folder(console: Console) -> None:
    console.session.pause(True)
    try:
        (job,) = console.session.enqueue("alice", fakes.request(), (PLAN,))
        alice = client(console)
        assert alice.get(f"/runs/{job.id}").json()["state"] == "queued"
        assert alice.get(f"/runs/{job.id}/export").status_code == 404
        assert alice.get(f"/runs/{job.id}/timings").json()["stages"] == []
        assert alice.delete(f"/runs/{job.id}").json() == {"deleted": job.id}
    finally:
        console.session.pause(False)


def test_a_deleted_run_is_gone_with_its_folder_and_its_pin(console: Console) -> None:
    job = made(console, "short life")
    alice = client(console)
    assert alice.put("/runs/baseline", json={"id": job.id}).json() == {"id": job.id}
    assert alice.delete(f"/runs/{job.id}").json() == {"deleted": job.id}
    assert not (console.root / job.id).exists()
    assert alice.get(f"/runs/{job.id}").status_code == 404
    assert alice.get("/runs/baseline").json() == {"id": ""}


def test_a_running_job_cannot_be_deleted(console: Console) -> None:
    (job,) = console.session.enqueue("alice", fakes.request("slow"), (PLAN,))
    while console.jobs.need(job.id).state == "queued":
        time.sleep(0.02)
    answer = client(console).delete(f"/runs/{job.id}")
    ended(console, job)
    assert answer.status_code == 409
    assert (console.root / job.id).is_dir()


def test_each_user_has_a_baseline_that_outlives_the_console(console: Console, film: Job) -> None:
    alice = client(console)
    alice.put("/runs/baseline", json={"id": film.id})
    assert client(console, "bob").get("/runs/baseline").json() == {"id": ""}
    assert Baselines(console.root).get("alice") == film.id
    assert json.loads((console.root / "baselines.json").read_text())["alice"] == film.id
    assert alice.delete("/runs/baseline").json() == {"id": ""}
    assert Baselines(console.root).get("alice") == ""
