"""Parity as a job: a real replay in a child, its report, its pictures, and who may see them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.testclient import TestClient
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from app import parity_runs, presets
from app.access import User
from app.console import Console
from app.errors import Refused
from app.golden_imports import import_upload
from app.goldens import CHECKOUT, Goldens
from app.job import Job
from app.routes import parity
from tests import fakes

ROOT = Path(__file__).parents[2]
PLAN = presets.load_plan(presets.find("plans", "cpu"))
IMG2IMG = "t2va_22f_img2img_denoise05"


def job(*goldens: str, plan: str = "cpu", as_captured: bool = True) -> Job:
    task = {"goldens": list(goldens), "as_captured": as_captured}
    chosen = presets.load_plan(presets.find("plans", plan))
    return Job(id="job1", kind="parity", owner="alice", plan=chosen, task=task, created=1.0)


def never() -> bool:
    return False


def unwatched(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def report(root: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((root / "job1" / "parity.json").read_text())
    return found


def spoilt(root: Path, case: str, tensor: str) -> str:
    """An imported copy of a golden in which one stored tensor is wrong; its id."""
    file = safe_open(str(CHECKOUT / f"{case}.safetensors"), framework="pt")
    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    tensors[tensor] = tensors[tensor] * 1.2 + 0.3
    path = root / "spoilt.safetensors"
    save_file(tensors, str(path), file.metadata())
    with path.open("rb") as stream:
        name = import_upload(Goldens(root), "alice", "spoilt.safetensors", stream)
    path.unlink()
    return f"{name}/spoilt"


# ---- the child


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which a good golden and a spoilt copy of it were run as captured."""
    root = tmp_path_factory.mktemp("broken")
    bad = spoilt(root, IMG2IMG, "final/video")
    chosen = job(f"checkout/{IMG2IMG}", bad)
    assert parity_runs.run(chosen, root / "job1", unwatched, never) == ("done", "")
    return root


def test_a_spoilt_golden_fails_beside_a_good_one(broken: Path, cpu_paths: str) -> None:
    good, bad = report(broken)["results"]  # type: ignore[misc]
    assert good["status"] in ("bit-equal", "pass")
    assert cpu_paths != "pinned" or good["status"] == "bit-equal"
    assert bad["status"] == "FAIL"
    assert bad["divergence"]["free"]["stage"] == "final"
    assert bad["divergence"]["free"]["name"] == "final/video"
    assert bad["divergence"]["free"]["limit"] == "fp32 stage"
    assert report(broken)["cases"] == 2
    assert [good["golden"], bad["golden"]] == [f"checkout/{IMG2IMG}", "spoilt/spoilt"]


def test_every_compared_tensor_has_all_figures_its_step_and_part(broken: Path) -> None:
    details = json.loads((broken / "job1" / "cases" / "1.json").read_text())["details"]
    by_name = {d["name"]: d for d in details if d["run"] == "free"}
    wrong = by_name["final/video"]
    assert (wrong["part"], wrong["passed"], wrong["equal"]) == ("video", False, False)
    assert wrong["max_abs"] > wrong["mean_abs"] > 0
    assert 0.9 < wrong["cosine"] < 1
    assert 0 < wrong["psnr"] < 60
    steps = {
        (d["step"], d["part"], d["quantity"]) for d in by_name.values() if d["step"] is not None
    }
    wanted = {("video", q) for q in ("x", "denoised", "velocity")}
    assert {(part, quantity) for _, part, quantity in steps} >= wanted
    assert ("audio", "velocity") in {(part, quantity) for _, part, quantity in steps}


def test_the_difference_pictures_show_where_and_how_much(broken: Path) -> None:
    good, bad = report(broken)["results"]  # type: ignore[misc]
    frames = bad["frames"]
    folder = broken / "job1" / "frames" / frames["folder"]
    assert len(list(folder.iterdir())) == 3 * frames["count"] == 66
    with Image.open(folder / "difference_0003.png") as picture:
        levels = np.asarray(picture)
    assert levels.max() == 255
    assert frames["frames"][3]["scale"] > 0.001
    assert all(frame["equal"] for frame in good["frames"]["frames"])
    with Image.open(broken / "job1" / "frames" / good["frames"]["folder"] / "ours_0003.png") as one:
        assert one.size == (frames["width"], frames["height"])


def test_the_joins_of_the_temporal_blend_are_named(tmp_path: Path) -> None:
    chosen = job("checkout/vae_decode_tlat9_32x48")
    parity_runs.run(chosen, tmp_path / "job1", unwatched, never)
    (result,) = report(tmp_path)["results"]  # type: ignore[misc]
    assert result["frames"]["joins"] == [17]
    joined = [f["frame"] for f in result["frames"]["frames"] if f["join"] == 17]
    assert joined == [17, 18, 19, 20, 21]


def test_progress_names_case_run_and_step(broken: Path) -> None:
    events = [json.loads(x) for x in (broken / "job1" / "parity.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    assert {(e["case"], e["run"]) for e in steps} >= {(IMG2IMG, "free"), (IMG2IMG, "staged")}
    assert [e["status"] for e in events if e["event"] == "result"][1] == "FAIL"


def test_a_plan_that_contradicts_a_golden_is_unsupported_and_says_why(tmp_path: Path) -> None:
    chosen = job("checkout/unit_pruned_bf16", f"checkout/{IMG2IMG}", as_captured=False)
    assert parity_runs.run(chosen, tmp_path / "job1", unwatched, never)[0] == "done"
    bf16, fp32 = report(tmp_path)["results"]  # type: ignore[misc]
    assert bf16["status"] == "unsupported"
    assert bf16["reason"] == "the golden was captured in bf16 and plan cpu computes in fp32"
    assert fp32["status"] in ("bit-equal", "pass")
    settings = {s["field"]: (s["value"], s["from"]) for s in fp32["settings"]}
    assert settings["attention"] == ("sdpa", "plan")
    assert settings["dtype"] == ("fp32", "golden")


def test_a_plan_for_a_gpu_that_is_not_there_fails_with_the_sentence(tmp_path: Path) -> None:
    chosen = job("checkout/schedules", plan="h200x1_sdpa", as_captured=False)
    state, reason = parity_runs.run(chosen, tmp_path / "job1", unwatched, never)
    assert (state, reason) == (
        "failed",
        "plan h200x1_sdpa names cuda: torch sees no CUDA device here",
    )


def test_a_golden_that_was_deleted_meanwhile_fails_with_the_sentence(tmp_path: Path) -> None:
    state, reason = parity_runs.run(job("gone/x"), tmp_path / "job1", unwatched, never)
    assert state == "failed"
    assert "there is no golden 'gone/x'" in reason


def test_cancel_ends_the_child_and_its_workers(tmp_path: Path) -> None:
    seen: list[str] = []
    chosen = job("checkout/vae_encode_small", f"checkout/{IMG2IMG}")
    state, _ = parity_runs.run(
        chosen,
        tmp_path / "job1",
        lambda stage, done, total: seen.append(stage),
        lambda: any("starts" in stage for stage in seen),
    )
    assert state == "cancelled"
    assert not (tmp_path / "job1" / "parity.json").exists()
    assert _until_gone(str(tmp_path / "job1")) == []


def test_a_killed_console_takes_the_replay_with_it(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from app import parity_runs, presets;"
        "from app.job import Job;"
        "plan = presets.load_plan(presets.find('plans', 'cpu'));"
        "task = {'goldens': ['checkout/vae_encode_small'], 'as_captured': True};"
        "job = Job(id='job1', kind='parity', owner='a', plan=plan, task=task, created=1.0);"
        f"root = Path({str(tmp_path)!r});"
        "parity_runs.run(job, root / 'job1', lambda *x: print(*x, flush=True), lambda: False)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as console:
        assert console.stdout is not None
        while "starts" not in console.stdout.readline():
            pass
        os.kill(console.pid, signal.SIGKILL)
    assert _until_gone(str(tmp_path / "job1")) == []


def _until_gone(mark: str, seconds: float = 10.0) -> list[str]:
    """Command lines that still name `mark`, after at most so long."""
    deadline = time.monotonic() + seconds
    while (found := _naming(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _naming(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if mark in line and "launch.py parity" in line:
            found.append(line)
    return found


# ---- the routes


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    plan = replace(PLAN, family="fake")
    with Console(tmp_path_factory.mktemp("runs"), plan, families=fakes.FAMILIES) as console:
        yield console


def client(console: Console, name: str = "alice", *, admin: bool = False) -> TestClient:
    def refused(_: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 400
        return JSONResponse({"detail": str(error)}, status)

    app = FastAPI()
    who = User(name=name, admin=admin)
    app.include_router(parity.router(console, lambda: who), prefix="/api/v1")
    app.add_exception_handler(ValueError, refused)
    return TestClient(app, base_url="http://127.0.0.1/api/v1", client=("127.0.0.1", 5))


@pytest.fixture(scope="module")
def done(console: Console) -> str:
    """A parity run of alice that has ended."""
    body = {"goldens": ["checkout/vae_decode_tlat1_32x48", "checkout/schedules"]}
    answer = client(console).post("/parity", json=body)
    assert answer.status_code == 201, answer.text
    id = str(answer.json()["job"]["id"])
    deadline = time.monotonic() + 90
    while not console.jobs.need(id).over:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert console.jobs.need(id).state == "done", console.jobs.need(id).reason
    return id


def test_a_run_is_found_with_its_counts_cases_and_pictures(console: Console, done: str) -> None:
    alice = client(console)
    (run,) = [r for r in alice.get("/parity").json()["runs"] if r["job"]["id"] == done]
    assert sum(run["counts"].values()) == 2
    results = alice.get(f"/parity/{done}").json()["results"]
    number = [r["golden"] for r in results].index("checkout/vae_decode_tlat1_32x48")
    details = alice.get(f"/parity/{done}/cases/{number}").json()["details"]
    assert {"out/video"} <= {d["name"] for d in details}
    for side in ("golden", "ours", "difference"):
        picture = alice.get(f"/parity/{done}/frames/{number}/{side}/0")
        assert picture.headers["content-type"] == "image/png"
        with Image.open(io.BytesIO(picture.content)) as image:
            assert image.size == (48, 32)


@pytest.mark.parametrize("path", ["", "/cases/0", "/frames/0/ours/0", "/frames/1/ours/0"])
def test_a_run_of_somebody_else_is_not_there(path: str, console: Console, done: str) -> None:
    assert client(console, "bob").get(f"/parity/{done}{path}").status_code == 404
    assert client(console, "bob").get("/parity").json()["runs"] == []


@pytest.mark.parametrize(
    "path", ["/cases/7", "/cases/-1", "/frames/0/ours/99", "/frames/9/ours/0", "/frames/0/sum/0"]
)
def test_what_a_run_does_not_have_is_not_found(path: str, console: Console, done: str) -> None:
    assert client(console).get(f"/parity/{done}{path}").status_code in (404, 422)


def test_the_manifest_tells_no_folder_of_this_machine(console: Console) -> None:
    answer = client(console).get("/parity/goldens")
    assert len(answer.json()["goldens"]) >= 28
    assert str(ROOT) not in answer.text
    assert str(console.root) not in answer.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"goldens": ["checkout/none"]}, "there is no golden"),
        ({"goldens": ["../../etc/passwd"]}, "there is no golden"),
        ({"goldens": ["checkout/schedules"], "plan": "/etc/passwd"}, "there is no plan"),
        ({"goldens": ["checkout/schedules"], "plan": "nope"}, "there is no plan 'nope'"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(
    body: dict[str, object], said: str, console: Console
) -> None:
    answer = client(console).post("/parity", json=body)
    assert answer.status_code in (400, 404)
    assert said in answer.json()["detail"]


def test_an_import_is_listed_run_by_its_owner_only_and_deleted(console: Console) -> None:
    file = {"file": ("mine.safetensors", (CHECKOUT / "schedules.safetensors").read_bytes())}
    alice, bob = client(console), client(console, "bob")
    assert alice.post("/parity/goldens", files=file).json() == {"collection": "mine"}
    assert "mine" in [c["name"] for c in alice.get("/parity/goldens").json()["collections"]]
    assert bob.get("/parity/goldens").json()["collections"] == []
    assert bob.post("/parity", json={"goldens": ["mine/mine"]}).status_code == 404
    assert bob.delete("/parity/goldens/mine").status_code == 404
    assert alice.delete("/parity/goldens/mine").json() == {"deleted": "mine"}
    assert alice.get("/parity/goldens").json()["collections"] == []


def test_a_golden_without_its_checkpoints_is_refused_with_their_names(console: Console) -> None:
    header = {"case": "c", "kind": "te", "params": {"te": "qwen3vl_32b"}}
    text = json.dumps(
        {
            "__metadata__": {"header": json.dumps(header)},
            "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        }
    ).encode()
    data = len(text).to_bytes(8, "little") + text + b"a"
    alice = client(console)
    alice.post("/parity/goldens", files={"file": ("big.safetensors", data)})
    answer = alice.post("/parity", json={"goldens": ["big/big"]})
    assert answer.status_code == 400
    assert "its checkpoints qwen3vl_32b are not in the collection" in answer.json()["detail"]


def test_a_folder_is_imported_by_the_admin_of_this_machine_only(
    console: Console, tmp_path: Path
) -> None:
    source = tmp_path / "captured"
    source.mkdir()
    (source / "a.safetensors").write_bytes((CHECKOUT / "schedules.safetensors").read_bytes())
    body = {"folder": str(source)}
    assert client(console).post("/parity/goldens/folder", json=body).status_code == 403
    admin = client(console, "root", admin=True)
    shared = admin.post("/parity/goldens/folder", json=body, headers={"host": "x.gradio.live"})
    assert shared.status_code == 403
    assert admin.post("/parity/goldens/folder", json=body).json() == {"collection": "captured"}
    missing = admin.post("/parity/goldens/folder", json={"folder": str(tmp_path / "none")})
    assert "is not a folder" in missing.json()["detail"]
    nobody = admin.post("/parity/goldens/folder", json={"folder": "~nosuchuser/goldens"})
    assert nobody.status_code == 400 and "leads nowhere" in nobody.json()["detail"]
