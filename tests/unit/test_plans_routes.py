"""Plans, backends and preflight over REST: names, owners, refusals, and no folder for a guest."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.testclient import TestClient

from app import backends, plan_fields, presets, validated
from app.access import User
from app.console import Console
from app.errors import Refused
from app.machine import Gpu, Machine
from app.routes import jobs, plans
from runtime.kernels.attention import BACKENDS as ATTENTION
from runtime.kernels.attention import attention_backend
from runtime.kernels.elementwise import BACKENDS as ELEMENTWISE
from runtime.kernels.elementwise import elementwise_backend
from runtime.kernels.linear import BACKENDS as LINEAR
from runtime.kernels.linear import linear_backend
from runtime.messages import Plan
from runtime.selftest import command
from tests import fakes

PLAN = replace(presets.load_plan(presets.find("plans", "cpu")), family="fake")
TINY = {"prompt": "a calm sea", "width": 64, "height": 64, "frames": 22, "steps": 2}
GPU = "h200x1_sdpa"


def found() -> dict[str, Any]:
    """What a probe of a machine with a CPU says."""

    def backend(name: str, field: str, available: bool) -> dict[str, Any]:
        support = {"device": "cpu", "available": available, "reason": "" if available else "no"}
        return {"name": name, "field": field, "devices": [support]}

    return {
        "machine": {"cpu": "Test"},
        "devices": [{"device": "cpu", "name": "Test"}],
        "attention": [backend("sdpa", "attention", True), backend("sage2", "attention", False)],
        "linear": [backend("nvfp4_dequant", "nvfp4", True)],
        "elementwise": [backend("eager", "elementwise", True)],
        "layouts": [],
        "problems": [],
    }


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    monkeypatch.setattr(backends, "run_child", lambda module, **options: json.dumps(found()))
    with Console(tmp_path / "runs", PLAN, families=fakes.FAMILIES) as opened:
        yield opened


def client(console: Console, *, admin: bool = True) -> TestClient:
    def refused(_: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 400
        return JSONResponse({"detail": str(error)}, status)

    app = FastAPI()
    for routes in (plans, jobs):
        made = routes.router(console, lambda: User(name="local", admin=admin))
        app.include_router(made, prefix="/api/v1")
    app.add_exception_handler(ValueError, refused)
    return TestClient(app, base_url="http://127.0.0.1/api/v1")


def fields(console: Console, name: str = GPU, **changes: Any) -> dict[str, Any]:
    plan = client(console).get(f"/plans/{name}").json()["fields"]
    del plan["name"]
    return plan | changes


def test_every_preset_is_listed_with_its_fields(console: Console) -> None:
    listed = {p["name"]: p for p in client(console).get("/plans").json()["plans"]}
    assert set(presets.names("plans")) <= set(listed)
    assert listed[GPU]["origin"] == "preset"
    assert listed[GPU]["fields"]["attention"] == "sdpa"


def test_a_plan_that_this_machine_cannot_run_is_told_apart(console: Console) -> None:
    listed = {p["name"]: p for p in client(console).get("/plans").json()["plans"]}
    assert listed["cpu"]["runs"] and not listed[GPU]["runs"]
    plan = console.planning.plans.get("cpu")
    assert console.planning.refusal(plan) == ""
    here = replace(plan, device="cuda", dtype="bf16")
    assert console.planning.refusal(here).startswith("This plan needs a CUDA GPU: ")
    missing = replace(plan, models=replace(plan.models, dit=Path("/no/dit.safetensors")))
    assert "/no/dit.safetensors, which is not there" in console.planning.refusal(missing)


def test_a_saved_plan_can_be_chosen_and_reads_back_as_it_was(console: Console) -> None:
    api = client(console)
    saved = api.put("/plans/mine", json=fields(console, dtype="fp32", threads=3))
    assert (saved.status_code, saved.json()["origin"]) == (200, "user")
    plan = console.planning.plans.get("mine")
    assert (plan.name, plan.dtype, plan.threads) == ("mine", "fp32", 3)
    assert presets.load_plan(console.root / "plans" / "mine.toml") == plan
    assert (
        api.post("/jobs", json={"request": TINY, "plans": ["mine"], "force": True})
        .json()["detail"]
        .startswith("plan mine needs")
    )


@pytest.mark.parametrize("name", ["Mine", "a b", "-x", "x" * 61, "..%2Fx", "a.toml", "é"])
def test_a_name_that_is_no_plain_word_is_refused(console: Console, name: str) -> None:
    answer = client(console).put(f"/plans/{name}", json=fields(console))
    assert answer.status_code in (400, 404)
    assert not list(console.root.glob("plans/*")) and not list(console.root.glob("*.toml"))


@pytest.mark.parametrize("name", [GPU, "cpu"])
def test_the_name_of_a_preset_stays_its_own(console: Console, name: str) -> None:
    api = client(console)
    assert api.put(f"/plans/{name}", json=fields(console)).status_code == 409
    assert api.delete(f"/plans/{name}").status_code == 409


def test_a_saved_plan_is_replaced_and_deleted(console: Console) -> None:
    api = client(console)
    for threads in (1, 2):
        assert api.put("/plans/mine", json=fields(console, threads=threads)).status_code == 200
    assert api.get("/plans/mine").json()["fields"]["threads"] == 2
    assert api.delete("/plans/mine").json() == {"deleted": "mine"}
    assert api.get("/plans/mine").status_code == api.delete("/plans/mine").status_code == 404


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "fp8"}, "plan field dtype must be one of bf16, fp32"),
        ({"threads": -1}, "threads must be 0"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_wrong_field_is_refused_and_nothing_is_written(
    console: Console, change: dict[str, Any], words: str
) -> None:
    answer = client(console).put("/plans/mine", json=fields(console, **change))
    assert answer.status_code in (400, 422)
    assert words in answer.text
    assert "mine" not in console.planning.plans.names()


def test_a_relative_model_path_is_refused(console: Console) -> None:
    plan = fields(console)
    plan["models"]["dit"] = "models/dit.safetensors"
    answer = client(console).put("/plans/mine", json=plan)
    assert "dit must be an absolute path" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/" + "n" * 5000, "/a\0b"])
def test_a_model_path_that_no_disk_has_is_refused(console: Console, path: str) -> None:
    plan = fields(console)
    plan["models"]["dit"] = path
    answer = client(console).put("/plans/mine", json=plan)
    assert answer.status_code == 400 and "leads nowhere" in answer.json()["detail"]
    assert "mine" not in console.planning.plans.names()


def test_a_damaged_plan_file_is_listed_with_its_problem(console: Console) -> None:
    folder = console.root / "plans"
    folder.mkdir()
    (folder / "broken.toml").write_text("dtype = ")
    entry = client(console).get("/plans/broken")
    assert entry.status_code == 400 and "not valid TOML" in entry.json()["detail"]
    listed = {p["name"]: p for p in client(console).get("/plans").json()["plans"]}
    assert "not valid TOML" in listed["broken"]["problem"]
    assert listed["cpu"]["fields"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Path.mkdir, "odd.toml cannot be read (is a directory); put a TOML file there"),
        (lambda path: path.symlink_to("/nowhere"), "cannot be read (no such file or directory)"),
        (lambda path: path.write_text("x = " + "[" * 100_000), "odd.toml is not valid TOML"),
    ],
)
def test_a_plan_file_that_cannot_be_read_is_a_sentence(
    console: Console, make: Callable[[Path], object], told: str
) -> None:
    folder = console.root / "plans"
    folder.mkdir()
    make(folder / "odd.toml")
    asked = {"request": TINY, "plan": "odd"}
    answers = [client(console).post("/preflight", json=asked)]
    answers += [client(console).post("/jobs", json={"request": TINY, "plans": ["odd"]})]
    answers += [client(console).get("/plans/odd")]
    for answer in answers:
        assert answer.status_code == 400 and told in answer.json()["detail"]


def test_a_guest_changes_nothing_and_sees_no_folders(console: Console) -> None:
    guest = client(console, admin=False)
    assert guest.put("/plans/mine", json=fields(console)).status_code == 403
    assert guest.delete("/plans/cpu").status_code == 403
    assert guest.post("/backends/probe").status_code == 403
    shown = guest.get(f"/plans/{GPU}").json()["fields"]["models"]["dit"]
    assert shown == "minimax_h3_ref2va_pruned_bf16.safetensors"
    estimate = guest.post("/preflight", json={"request": TINY, "plan": GPU})
    assert estimate.status_code == 200 and "is not there" in estimate.json()["blocked"]
    assert str(presets.FOLDER.parent) not in estimate.text
    unsaved = {"request": TINY, "plan": fields(console)}
    assert guest.post("/preflight", json=unsaved).status_code == 403


def test_preflight_takes_a_name_or_an_unsaved_plan(console: Console) -> None:
    api = client(console)
    named = api.post("/preflight", json={"request": TINY, "plan": "cpu"}).json()
    assert (named["verdict"], named["blocked"], named["plan"]) == ("fits", "", "cpu")
    assert named["rows"]["total"] == sum(named["rows"][k] for k in ("text", "audio", "video"))
    unsaved = {"request": TINY, "plan": fields(console, "cpu", text_encoder="stream")}
    assert api.post("/preflight", json=unsaved).json()["plan"] == "edited"
    gone = api.post("/preflight", json={"request": TINY, "plan": "none"})
    assert gone.status_code == 404 and "there are cpu" in gone.json()["detail"]


def test_a_plan_that_cannot_fit_is_queued_with_force_only(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = replace(PLAN, name="cuda", device="cuda")
    monkeypatch.setattr(console.planning.plans, "get", lambda name: cuda)
    body = {"request": TINY, "plans": ["cuda"]}
    refused = client(console).post("/jobs", json=body)
    assert refused.status_code == 400
    assert refused.json()["detail"].endswith(". Choose another plan, or queue it with force.")
    short = Machine(gpus=(Gpu(name="Tiny", compute="12.0", total=1 << 20, used=0),), ram_total=9)
    monkeypatch.setattr(console.planning, "machine", lambda: short)
    assert "Choose less, another plan" in client(console).post("/jobs", json=body).json()["detail"]
    assert client(console).post("/jobs", json=body | {"force": True}).status_code == 201


def wait_for_probe(console: Console) -> dict[str, Any]:
    told = threading.Event()
    for _ in range(200):
        shown: dict[str, Any] = client(console).get("/backends").json()
        if shown["probed"]:
            return shown
        told.wait(0.05)
    raise AssertionError("the probe did not end")


def test_the_first_look_probes_the_machine_once(console: Console) -> None:
    shown = wait_for_probe(console)
    sdpa, sage2 = shown["attention"]
    assert sdpa["known"]["cpu"] == "bit-equal" and sage2["known"]["lossy"]
    assert sdpa["here"]["text"] == "not validated on this machine"
    assert json.loads((console.root / "backends.json").read_text())["found"]["probed"]


def test_a_probe_of_another_machine_does_not_count(console: Console) -> None:
    wait_for_probe(console)
    probe = backends.Probe(console.root, console.hub)
    assert probe.stored(console.planning.machine().name) is not None
    assert probe.stored("another machine") is None


def test_the_package_of_every_backend_makes_an_older_probe_count_no_more() -> None:
    """And the file of a selftest has its version."""
    found = {
        *(attention_backend(name).package for name in ATTENTION),
        *(linear_backend(name).package for name in LINEAR),
        *(elementwise_backend(name).package for name in ELEMENTWISE),
    }
    assert found <= set(backends.PACKAGES) and found <= set(command.PACKAGES)


def test_a_backend_that_the_probe_refuses_is_a_reason_to_stop(console: Console) -> None:
    wait_for_probe(console)
    plan = fields(console, "cpu", attention="sage2")
    answer = client(console).post("/preflight", json={"request": TINY, "plan": plan}).json()
    assert answer["warnings"] == ["sage2 cannot run here: no."]
    assert answer["needs_force"] == "sage2 cannot run here: no."


def test_every_backend_of_the_runtime_is_described_and_no_other() -> None:
    described = set(validated.table()["backend"])
    assert described == {*ATTENTION, *LINEAR, *ELEMENTWISE}
    named = {name for row in validated.table()["validated"] for name in row["backends"]}
    assert named == described


def test_the_table_of_the_readme_is_that_of_the_program() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").splitlines()
    start = readme.index("| part | CPU golden | one H200 |") + 2
    rows = readme[start : readme.index("", start)]
    assert rows == list(validated.markdown())


def test_the_editor_knows_every_field_of_a_plan_and_its_values() -> None:
    edited = {field.name: field for field in plan_fields.plan_fields()}
    assert set(edited) == set(Plan.__dataclass_fields__) - {"name", "models", "family"}
    ltx = replace(PLAN, family="ltx", video_vae_dtype="fp32")
    for name, field in edited.items():
        plans = {"h3": (PLAN, field.values), "ltx": (ltx, field.ltx_values or field.values)}
        for plan, values in (plans[family] for family in field.families):
            for value in values:
                assert getattr(replace(plan, **{name: value}), name) == value
            if values:
                with pytest.raises(ValueError, match="must be one of") as refused:
                    replace(plan, **{name: "no such value"})
                assert all(value in str(refused.value) for value in values)


def test_the_editor_allows_the_numbers_that_a_plan_allows_and_no_others() -> None:
    for field in plan_fields.plan_fields():
        if field.kind in ("number", "whole number"):
            number = int if field.kind == "whole number" else float
            for good in (field.least, field.most):
                replace(PLAN, **{field.name: number(good)})
            for bad in (field.least - 1, field.most + 1):
                with pytest.raises(ValueError, match=f"plan field {field.name} must be"):
                    replace(PLAN, **{field.name: number(bad)})


def test_a_field_that_belongs_to_another_names_values_that_this_one_can_have() -> None:
    edited = {field.name: field for field in plan_fields.plan_fields()}
    for field in edited.values():
        if field.of:
            of = edited[field.of]
            assert set(field.of_values) < set(of.values or ATTENTION)
            assert of.group == field.group
