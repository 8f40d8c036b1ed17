"""Requests and plans of family ltx over REST: what is taken, refused, estimated and run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from app import preflight, presets
from app.console import Console
from app.shapes import LTXRequestJson
from runtime.checkpoints.header import RANDOM_WEIGHTS
from runtime.messages import LTXRequest, Plan, Reference
from tests.consoles import client, ltx_console, until
from tests.ltx_plans import plan_of

JOBS = "/api/v1/jobs"
SMALL = {"family": "ltx", "prompt": "a calm sea", "width": 64, "height": 64, "frames": 9}


@pytest.fixture
def ltx(tmp_path: Path) -> Plan:
    return plan_of(tmp_path / "models", RANDOM_WEIGHTS)


@pytest.fixture
def console(tmp_path: Path, ltx: Plan) -> Iterator[Console]:
    with ltx_console(tmp_path / "runs", ltx) as console:
        console.session.pause(True)
        yield console


@pytest.fixture
def web(console: Console) -> TestClient:
    return client(console)


def test_a_request_has_the_fields_and_defaults_of_the_runtime(
    console: Console, web: TestClient
) -> None:
    told = set(LTXRequestJson.model_fields)
    assert told == {f.name for f in fields(LTXRequest)} - {"id"}
    body = {"request": {"family": "ltx", "prompt": "x"}, "plans": ["mine"]}
    made = web.post(JOBS, json=body).json()["jobs"][0]
    assert console.jobs.need(made["id"]).request == LTXRequest(id=made["id"], prompt="x")


def test_the_first_frame_is_of_the_user_s_own_library(console: Console, web: TestClient) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(picture, "png")
    media = console.media.add("local", "boat.png", io.BytesIO(picture.getvalue()))
    body: dict[str, Any] = {"request": SMALL | {"image": media.id}, "plans": ["mine"]}
    made = web.post(JOBS, json=body).json()["jobs"][0]
    assert (made["family"], made["fps"], made["steps"], made["cfg"]) == ("ltx", 24, 11, 1.0)
    assert made["references"] == [{"kind": "image", "name": "boat.png", "media": media.id}]
    shown = web.get(f"{JOBS}/{made['id']}").json()["request"]
    assert shown["image"] == media.id and LTXRequestJson(**shown)
    assert (
        web.post(JOBS, json={"request": SMALL | {"image": "no"}, "plans": ["mine"]}).status_code
        == 404
    )
    assert web.delete(f"/api/v1/media/{media.id}").status_code == 409  # a job needs it


@pytest.mark.parametrize(
    ("request_", "plan", "words"),
    [
        (SMALL | {"width": 96}, "mine", "multiples of 64"),
        (SMALL | {"steps": 4}, "mine", "steps"),
        (SMALL | {"references": []}, "mine", "references"),
        ({"family": "h3", "prompt": "x", "image": "y"}, "cpu", "image"),
        ({"family": "h3", "prompt": "x"}, "mine", "for MiniMax H3 and plan mine runs LTX-2.5"),
    ],
)
def test_a_body_of_the_wrong_family_is_refused_in_one_sentence(
    web: TestClient, request_: dict[str, Any], plan: str, words: str
) -> None:
    answer = web.post(JOBS, json={"request": request_, "plans": [plan]})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["detail"] and "\n" not in answer.json()["detail"]


def test_a_first_frame_that_is_too_thin_is_refused_by_the_name_its_user_gave_it(
    console: Console, web: TestClient
) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (1, 9)).save(picture, "png")
    media = console.media.add("local", "dünn boat.png", io.BytesIO(picture.getvalue()))
    told = "dünn boat.png has 1x9 pixels, and a picture needs 2 or more each way; choose another"
    request = SMALL | {"image": media.id}
    asked = web.post("/api/v1/preflight", json={"request": request, "plan": "mine"}).json()
    assert asked["references"][0]["problem"] == told == asked["blocked"]
    queued = web.post(JOBS, json={"request": request, "plans": ["mine"]})
    assert (queued.status_code, queued.json()) == (400, {"detail": told})
    assert preflight.check_reference(Reference(kind="image", path=media.path)).width == 1  # of H3


@pytest.mark.parametrize(
    ("family", "got"), [("wan", "'wan'"), (3, "3"), (None, "None"), (["ltx"], "['ltx']")]
)
def test_a_body_of_no_known_family_is_told_those_that_there_are(
    web: TestClient, family: Any, got: str
) -> None:
    told = {"detail": f"family must be one of h3, ltx, got {got}"}
    request = SMALL | {"family": family}
    for path, body in ((JOBS, {"plans": ["mine"]}), ("/api/v1/preflight", {"plan": "mine"})):
        answer = web.post(path, json={"request": request} | body)
        assert (answer.status_code, answer.json()) == (400, told)
    made = web.post(JOBS, json={"request": SMALL, "plans": ["mine"]}).json()["jobs"][0]["id"]
    answer = web.patch(f"{JOBS}/{made}", json={"request": request})
    assert (answer.status_code, answer.json()) == (400, told)


def test_preflight_refuses_a_pair_of_two_families_as_the_queue_does(web: TestClient) -> None:
    for request, plan in (({"prompt": "x"}, "mine"), (SMALL, "cpu")):
        queued = web.post(JOBS, json={"request": request, "plans": [plan], "force": True})
        asked = web.post("/api/v1/preflight", json={"request": request, "plan": plan})
        assert (asked.status_code, asked.json()) == (queued.status_code, queued.json())
        assert asked.status_code == 400 and "choose a plan of family" in asked.json()["detail"]


@pytest.mark.parametrize(
    ("request_", "plan"),
    [
        (SMALL | {"prompt": "x" * 7001}, "mine"),
        ({"prompt": "x" * 7001}, "cpu"),
        ({"prompt": "", "negative_prompt": "x" * 7001}, "cpu"),
    ],
)
def test_preflight_refuses_a_prompt_that_the_queue_does_not_take(
    web: TestClient, request_: dict[str, Any], plan: str
) -> None:
    told = {"detail": "a prompt may have 7,000 characters, this one has 7,001; shorten it"}
    asked = web.post("/api/v1/preflight", json={"request": request_, "plan": plan})
    queued = web.post(JOBS, json={"request": request_, "plans": [plan]})
    assert (asked.status_code, asked.json()) == (400, told) == (queued.status_code, queued.json())


def test_a_plan_of_an_unknown_family_is_neither_saved_nor_asked_about(
    console: Console, web: TestClient, ltx: Plan, tmp_path: Path
) -> None:
    told = "family must be one of h3, ltx, got 'wan'"
    body = web.get("/api/v1/plans/mine").json()["fields"] | {"family": "wan"}
    del body["name"]
    answer = web.put("/api/v1/plans/other", json=body)
    assert (answer.status_code, answer.json()) == (400, {"detail": told})
    assert "other" not in console.planning.plans.names()
    answer = web.post("/api/v1/preflight", json={"request": SMALL, "plan": body})
    assert (answer.status_code, answer.json()) == (400, {"detail": told})
    for field, value in (("family", 3), ("vae_tiles", "4")):  # it names the field that is wrong
        asked = {"request": SMALL, "plan": body | {field: value}}
        told_by = web.post("/api/v1/preflight", json=asked).json()["detail"]
        assert told_by.startswith(f"body.plan.fields.{field}: Input should be a valid ")
    older = presets.dump_plan(ltx).replace('"ltx"', '"wan"')  # saved before it was refused
    (console.root / "plans" / "older.toml").write_text(older)
    listed = {one["name"]: one for one in web.get("/api/v1/plans").json()["plans"]}
    assert (listed["older"]["problem"], listed["older"]["runs"]) == (told, False)


def test_a_saved_plan_has_its_family_s_default_where_a_field_is_left_out(
    console: Console, web: TestClient
) -> None:
    body = web.get("/api/v1/plans/mine").json()["fields"]
    del body["name"], body["video_vae_dtype"]
    answer = web.put("/api/v1/plans/short", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["fields"]["video_vae_dtype"] == "bf16"
    assert console.planning.plans.get("short").video_vae_dtype == "bf16"
    answer = web.put("/api/v1/plans/narrow", json=body | {"video_vae_dtype": "fp16"})
    told = "plan field video_vae_dtype must be one of bf16, fp32, got 'fp16'"
    assert (answer.status_code, answer.json()) == (400, {"detail": told})
    fields = {one["name"]: one for one in web.get("/api/v1/backends").json()["fields"]}
    told_of = [fields["video_vae_dtype"][key] for key in ("default", "ltx_default")]
    assert told_of == ["fp16", "bf16"]


def test_presets_are_listed_by_family(web: TestClient) -> None:
    listed = {p["name"] for p in web.get("/api/v1/presets?family=ltx").json()["presets"]}
    assert "ltx_demo" in listed and "demo" not in listed
    assert "ltx_demo" not in {p["name"] for p in web.get("/api/v1/presets").json()["presets"]}
    assert web.get("/api/v1/presets?family=wan").status_code == 400


def test_preflight_promises_no_memory_that_was_not_counted(web: TestClient, ltx: Plan) -> None:
    weights = sum(file.stat().st_size for file in ltx.models.dit.parent.rglob("*.safetensors"))
    found = web.post("/api/v1/preflight", json={"request": SMALL, "plan": "mine"}).json()
    assert (found["blocked"], found["verdict"], found["needs_force"]) == ("", "unknown", "")
    assert found["rows"]["total"] == 2 * 2 * 2 + 9  # 9 frames: 2 latents of 2 x 2, 9 of sound
    assert found["ram"]["verdict"] == "unknown" and found["ram"]["needed"] > weights
    assert "not counted before a first run" in found["ram"]["reason"]
    assert "two-stream LTX denoiser" in found["mode_note"]


def test_a_job_of_ltx_runs_beside_one_of_h3(console: Console, web: TestClient) -> None:
    first = {"prompt": "a calm sea", "width": 64, "height": 64, "frames": 22, "steps": 2}
    ids = [
        web.post(JOBS, json={"request": body, "plans": [plan]}).json()["jobs"][0]["id"]
        for body, plan in ((first, "cpu"), (SMALL | {"frames": 25}, "mine"))
    ]
    console.session.pause(False)
    until(lambda: all(console.jobs.need(id).over for id in ids))
    assert [console.jobs.need(id).state for id in ids] == ["done", "done"]
    timings = web.get(f"/api/v1/runs/{ids[1]}/timings").json()
    assert timings["conditions"]["family"] == "ltx" and timings["shape"]["fps"] == 24
