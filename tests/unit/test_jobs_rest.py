"""/api/v1/jobs over a real engine with the fake family: every verb, its refusals, its speed."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from app.access import User
from app.console import Console
from app.jobs import Job
from app.shapes import RequestJson
from runtime.messages import Ref2VARequest
from tests import fakes
from tests.consoles import at_step, client, demo_plan, ended, fake_console, until

JOBS = "/api/v1/jobs"
SMALL = {"prompt": "a calm sea", "width": 64, "height": 64, "frames": 22, "steps": 4}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with fake_console(tmp_path_factory.mktemp("runs")) as console:
        yield console


@pytest.fixture
def web(console: Console) -> Iterator[TestClient]:
    until(lambda: not console.jobs.queue())
    yield client(console)
    console.session.pause(False)
    for job in console.jobs.queue():
        console.session.cancel(job.id)


@pytest.fixture
def other(console: Console) -> str:
    """The name of a saved plan."""
    return console.planning.plans.save("other", demo_plan()).name


def post(web: TestClient, *plans: str, **fields: Any) -> list[dict[str, Any]]:
    answer = web.post(JOBS, json={"request": SMALL | fields, "plans": list(plans) or ["cpu"]})
    assert answer.status_code == 201, answer.text
    found: list[dict[str, Any]] = answer.json()["jobs"]
    return found


def listed(web: TestClient, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = web.get(JOBS + query).json()["jobs"]
    return found


def test_a_job_is_made_runs_and_can_be_found(console: Console, web: TestClient) -> None:
    (made,) = post(web, seed=str(2**64 - 1))
    assert made["mine"] and made["plan"] == "cpu" and made["seed"] == "18446744073709551615"
    ended(console, made["id"])
    found = web.get(f"{JOBS}/{made['id']}").json()
    assert found["state"] == "done" and found["demo"]
    assert found["video"] == f"/api/v1/runs/{made['id']}/video"
    assert web.get(found["video"]).headers["content-type"] == "video/mp4"
    assert web.get(found["preview"]).headers["content-type"] == "image/webp"
    assert found["notes"][0]["text"] == "0 references"
    assert {"denoise", "end to end"} <= {stage["stage"] for stage in found["stages"]}
    assert found["plan_fields"]["attention"] == "sdpa"
    assert RequestJson(**{k: v for k, v in found["request"].items() if k != "references"})


def test_a_request_has_the_fields_and_defaults_of_the_runtime(
    console: Console, web: TestClient
) -> None:
    told = set(RequestJson.model_fields) - {"family"}
    assert told == {f.name for f in fields(Ref2VARequest)} - {"id"}
    console.session.pause(True)
    answer = web.post(JOBS, json={"request": {"prompt": "x"}, "plans": ["cpu"]}).json()["jobs"][0]
    request = console.jobs.need(answer["id"]).request
    assert request == Ref2VARequest(id=answer["id"], prompt="x")


def test_references_are_named_by_the_users_own_media(console: Console, web: TestClient) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(picture, "png")
    media = console.media.add("local", "boat.png", io.BytesIO(picture.getvalue()))
    console.session.pause(True)
    reference = {"kind": "image", "media": media.id}
    (made,) = post(web, references=[reference])
    assert made["references"] == [{"kind": "image", "name": "boat.png", "media": media.id}]
    shown = web.get(f"{JOBS}/{made['id']}").json()["request"]["references"][0]
    assert (shown["media"], shown["soundtrack"], shown["mute"]) == (media.id, None, False)
    foreign = client(console, User(name="mia"))
    body = {"request": SMALL | {"references": [reference]}, "plans": ["cpu"]}
    assert foreign.post(JOBS, json=body).status_code == 404


def test_two_plans_make_an_a_b_of_neighbours(console: Console, web: TestClient, other: str) -> None:
    console.session.pause(True)
    a, b = post(web, "cpu", other)
    assert a["group"] == b["group"] != "" and (a["plan"], b["plan"]) == ("cpu", other)
    assert [job["id"] for job in listed(web)[:2]] == [a["id"], b["id"]]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"request": SMALL | {"width": 65}, "plans": ["cpu"]}, 400, "multiples of 32"),
        ({"request": SMALL | {"width": "64"}, "plans": ["cpu"]}, 400, "width"),
        ({"request": SMALL | {"seed": "-1"}, "plans": ["cpu"]}, 400, "seed must be"),
        ({"request": SMALL | {"seed": "1" * 5000}, "plans": ["cpu"]}, 400, "seed must be"),
        ({"request": SMALL | {"cfg": 1e999}, "plans": ["cpu"]}, 400, ""),
        ({"request": SMALL | {"path": "/etc/passwd"}, "plans": ["cpu"]}, 400, "path"),
        ({"request": SMALL | {"prompt": "x" * 7001}, "plans": ["cpu"]}, 400, "7,000 char"),
        ({"request": SMALL | {"prompt": "\ud800"}, "plans": ["cpu"]}, 400, ""),
        ({"request": SMALL, "plans": []}, 400, "plans"),
        ({"request": SMALL, "plans": ["/etc/passwd"]}, 404, "no plan '/etc/passwd'"),
        ({"request": SMALL, "plans": ["../../x"]}, 404, "no plan"),
        ({"plans": ["cpu"]}, 400, "request"),
    ],
)
def test_a_bad_body_is_refused_in_one_sentence(
    web: TestClient, body: dict[str, Any], status: int, words: str
) -> None:
    text = json.dumps(body)
    answer = web.post(JOBS, content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    detail = answer.json()["detail"]
    assert isinstance(detail, str) and words in detail and "\n" not in detail


def test_a_waiting_job_is_edited_moved_and_deleted(
    console: Console, web: TestClient, other: str
) -> None:
    console.session.pause(True)
    a, b = post(web)[0]["id"], post(web)[0]["id"]
    changed = web.patch(f"{JOBS}/{b}", json={"request": SMALL | {"prompt": "rain"}, "before": a})
    assert changed.json()["prompt"] == "rain"
    assert [job["id"] for job in listed(web, "?state=queued")] == [b, a]
    web.patch(f"{JOBS}/{b}", json={"before": None})
    assert [job["id"] for job in listed(web, "?state=queued")] == [a, b]
    assert web.patch(f"{JOBS}/{b}", json={"plan": other}).json()["plan"] == other
    assert web.delete(f"{JOBS}/{b}").status_code == 200
    assert web.get(f"{JOBS}/{b}").status_code == 404


def test_wrong_states_are_conflicts(console: Console, web: TestClient) -> None:
    id = post(web, prompt="slow", steps=50)[0]["id"]
    at_step(console, id, 1)
    assert web.patch(f"{JOBS}/{id}", json={"before": None}).status_code == 409
    assert web.delete(f"{JOBS}/{id}").status_code == 409
    assert web.post(f"{JOBS}/{id}/retry").status_code == 409
    assert web.post(f"{JOBS}/queue/unload").status_code == 409
    assert web.post(f"{JOBS}/{id}/cancel").json()["state"] == "cancelling"
    ended(console, id)
    assert web.post(f"{JOBS}/{id}/cancel").status_code == 409
    again = web.post(f"{JOBS}/{id}/retry")
    assert again.status_code == 201 and again.json()["parent"] == id
    assert again.json()["attempt"] == 2
    copy = web.post(f"{JOBS}/{id}/duplicate").json()
    assert (copy["parent"], copy["attempt"]) == (id, 1)


def test_the_queue_pauses_and_the_engine_unloads(console: Console, web: TestClient) -> None:
    assert web.post(f"{JOBS}/queue", json={"paused": True}).json() == {"paused": True}
    assert web.get(JOBS).json()["paused"] is True
    web.post(f"{JOBS}/queue/unload")
    until(lambda: web.get(JOBS).json()["engine"]["state"] == "unloaded")
    web.post(f"{JOBS}/queue", json={"paused": False})
    ended(console, post(web)[0]["id"])
    assert web.get(JOBS).json()["engine"]["state"] == "ready"


@pytest.mark.parametrize("query", ["?state=sleeping", "?kind=x", "?limit=0", "?limit=x"])
def test_a_filter_that_is_none_is_refused(web: TestClient, query: str) -> None:
    assert web.get(JOBS + query).status_code == 400


def test_of_a_foreign_job_only_its_place_in_the_queue_is_seen(
    console: Console, web: TestClient
) -> None:
    console.session.pause(True)
    mia = client(console, User(name="mia"))
    id = post(web, prompt="a secret plan")[0]["id"]
    own = post(mia, prompt="hers")[0]["id"]
    queue = listed(mia)
    assert [(job["id"], job["mine"], job["prompt"]) for job in queue] == [
        (id, False, ""),
        (own, True, "hers"),
    ]
    assert set(queue[0]) == set(queue[1])
    assert "secret" not in json.dumps(queue) and "local" not in json.dumps(queue[0])
    for verb in ("cancel", "retry", "duplicate"):
        assert mia.post(f"{JOBS}/{id}/{verb}").status_code == 404
    assert mia.get(f"{JOBS}/{id}").status_code == 404
    assert mia.delete(f"{JOBS}/{id}").status_code == 404
    assert mia.patch(f"{JOBS}/{own}", json={"before": id}).status_code == 409
    assert mia.post(f"{JOBS}/queue", json={"paused": False}).status_code == 403
    console.session.cancel(id)
    assert [job["id"] for job in listed(mia)] == [own]
    assert {job["id"] for job in listed(web)} >= {id, own}


def test_events_tell_every_state_and_the_last_one_is_the_truth(
    console: Console, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    publish = console.hub.publish

    def spy(kind: str, data: dict[str, Any], owner: str = "") -> None:
        told.append((kind, data))
        publish(kind, data, owner)

    monkeypatch.setattr(console.hub, "publish", spy)
    id = post(web, prompt="slow", steps=3)[0]["id"]
    until(lambda: any(d["id"] == id and d["state"] == "done" for k, d in told if k == "job"))
    states = [data["state"] for kind, data in told if kind == "job" and data["id"] == id]
    assert list(dict.fromkeys(states)) in (["running", "done"], ["queued", "running", "done"])
    assert [data["step"] for kind, data in told if kind == "preview"] == [0, 1, 2]
    assert ("queue", {"paused": False}) in told
    assert {"busy", "ready"} <= {data["state"] for kind, data in told if kind == "engine"}


def test_the_list_takes_less_than_fifty_milliseconds_while_a_job_runs(
    console: Console, web: TestClient
) -> None:
    console.session.pause(True)
    plan = demo_plan()
    old = Job(id="old", kind="generate", owner="local", plan=plan, task={}, created=1.0)
    console.jobs.add(
        *(
            replace(old, id=f"old{n}", state="done", request=fakes.request(id=f"old{n}"))
            for n in range(200)
        )
    )
    slow = post(web, prompt="slow", steps=50)[0]["id"]
    for _ in range(20):
        post(web)
    console.session.pause(False)
    at_step(console, slow, 1)
    batches = [sorted(seconds_of(web, 20)) for _ in range(5)]
    assert min(batch[18] for batch in batches) < 0.05, batches  # the best: CI has two busy cores


def seconds_of(web: TestClient, times: int) -> Iterator[float]:
    """Each time that the list of two hundred jobs takes."""
    for _ in range(times):
        began = time.perf_counter()
        assert len(listed(web, "?limit=200")) == 200
        yield time.perf_counter() - began
