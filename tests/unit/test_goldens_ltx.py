"""LTX goldens in the console: listed from their headers alone, imported, refused."""

from __future__ import annotations

import io
import json
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import parity_runs, presets
from app.access import User
from app.golden_imports import import_folder, import_upload
from app.goldens import Golden, Goldens
from app.job import Job
from runtime.parity.places import Place, place_of

ALICE = User(name="alice")


def imported(goldens: Goldens) -> dict[str, Golden]:
    return {g.case: g for g in goldens.list(ALICE) if g.origin == "imported"}


def file_of(document: Any) -> io.BytesIO:
    """One small tensor and this document."""
    header = {
        "__metadata__": {"golden": json.dumps(document)},
        "in.video_latent": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    text = json.dumps(header).encode()
    return io.BytesIO(struct.pack("<Q", len(text)) + text + b"ab")


def test_a_folder_of_ltx_goldens_is_listed_with_what_each_is(
    ltx_goldens: Path, tmp_path: Path
) -> None:
    goldens = Goldens(tmp_path)
    import_folder(goldens, "alice", ltx_goldens)
    found = imported(goldens)
    assert len(found) == len(list(ltx_goldens.glob("*.safetensors")))
    assert not [g for g in found.values() if g.missing or g.problem or g.rebuilt]
    stage = next(g for g in found.values() if g.kind == "ltx_sampler" and g.steps == 8)
    assert (stage.width, stage.height, stage.frames) == (128, 64, 17)
    assert (stage.sampler, stage.switches) == ("euler_ancestral", {"denoiser": "float32"})
    assert stage.needs == ("t_bf16",)
    assert (stage.comfyui, stage.commit[:8], stage.torch) == ("0.33.0", "0f1fa67a", "2.13.0+cpu")
    rope = next(g for g in found.values() if g.kind == "ltx_rope")
    assert (rope.width, rope.height, rope.needs) == (1280, 704, ())


def test_those_of_the_checkout_are_there_without_an_import(
    ltx_goldens: Path, tmp_path: Path
) -> None:
    found = [g for g in Goldens(tmp_path).list(ALICE) if g.rebuilt == "ltx"]
    assert [g.path.name for g in found] == sorted(p.name for p in ltx_goldens.glob("*.safetensors"))
    assert {(g.origin, g.missing, g.problem) for g in found} == {("checkout", (), "")}
    assert {need for g in found for need in g.needs} == {"t_bf16", "t_nvfp4_official"}


def test_pages_that_ask_first_at_once_all_get_them(tmp_path: Path) -> None:
    goldens = Goldens(tmp_path)
    with ThreadPoolExecutor(4) as pages:
        lists = list(pages.map(goldens.list, [ALICE] * 4))
    assert lists == [lists[0]] * 4 and not [g for g in lists[0] if g.problem]


def test_where_they_cannot_be_unpacked_the_others_are_listed(tmp_path: Path) -> None:
    (tmp_path / "goldens").write_text("a file, so that nothing can lie in it")
    found = Goldens(tmp_path).list(ALICE)
    assert len([g for g in found if not g.problem]) >= 28
    problems = {g.problem for g in found if g.rebuilt == "ltx"}
    assert len(problems) == 1 and "could not be unpacked into" in problems.pop()


def test_an_import_of_their_name_is_another_collection(ltx_goldens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkout+ltx"
    folder.mkdir()
    shutil.copy(ltx_goldens / "schedule_values.safetensors", folder)
    goldens = Goldens(tmp_path / "runs")
    name = import_folder(goldens, "alice", folder)
    ids = [g.id for g in goldens.list(ALICE)]
    assert f"{name}/schedule_values" in ids and len(ids) == len(set(ids))
    others = [g for g in goldens.list(User(name="bob")) if g.collection == name]
    assert not others


def test_one_of_the_checkout_is_replayed_with_rebuilt_checkpoints(tmp_path: Path) -> None:
    chosen = next(g for g in Goldens(tmp_path).list(ALICE) if g.needs == ("t_nvfp4_official",))
    task = {"goldens": [chosen.id, "checkout/schedules"], "as_captured": True}
    assert {result["status"] for result in replayed(tmp_path, task)} <= {"bit-equal", "pass"}
    assert sorted(path.name for path in chosen.checkpoints.glob("*")) == [
        "t_bf16.safetensors",
        "t_nvfp4.safetensors",
        "t_nvfp4_official.safetensors",
    ]


def replayed(root: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a parity job."""
    plan = presets.load_plan(presets.find("plans", "cpu"))
    job = Job(id="job1", kind="parity", owner="alice", plan=plan, task=task, created=1.0)
    done = parity_runs.run(job, root / "job1", lambda *_: None, lambda: False)
    assert done == ("done", "")
    results: list[dict[str, Any]] = json.loads((root / "job1" / "parity.json").read_text())[
        "results"
    ]
    return results


def test_a_job_replays_an_imported_one_with_its_own_checkpoints(
    ltx_goldens: Path, tmp_path: Path
) -> None:
    goldens = Goldens(tmp_path)
    import_folder(goldens, "alice", ltx_goldens)
    stage = next(g for g in imported(goldens).values() if g.kind == "ltx_sampler" and g.steps == 3)
    (result,) = replayed(tmp_path, {"goldens": [stage.id], "as_captured": True})
    assert result["status"] in ("bit-equal", "pass")
    details = json.loads((tmp_path / "job1" / "cases" / "0.json").read_text())["details"]
    assert {d["step"] for d in details} >= {0, 1, 2}


def test_a_checkpoint_that_was_not_imported_is_named(tmp_path: Path) -> None:
    goldens = Goldens(tmp_path)
    document = {"case": "c", "params": {}, "checkpoint": {"file": "mine.safetensors"}}
    import_upload(goldens, "alice", "c.safetensors", file_of(document))
    assert imported(goldens)["c"].missing == ("mine",)


@pytest.mark.parametrize(
    "params",
    [{"F": "3", "H": 2, "W": 4}, {"F": 3, "H": -2, "W": 4}, {"sigmas": 3}, {"dtype": []}],
)
def test_odd_values_are_left_out(params: dict[str, Any], tmp_path: Path) -> None:
    goldens = Goldens(tmp_path)
    document = {"case": "c", "params": params, "environment": 7, "checkpoint": [1]}
    import_upload(goldens, "alice", "c.safetensors", file_of(document))
    one = imported(goldens)["c"]
    assert (one.kind, one.width, one.steps, one.commit) == ("ltx_forward", 0, 0, "")


@pytest.mark.parametrize("document", [7, {"case": "c"}, {"case": "c", "params": []}])
def test_a_document_without_params_is_no_golden(document: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no golden: its metadata has no header with case"):
        import_upload(Goldens(tmp_path), "alice", "c.safetensors", file_of(document))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("comfy_pre_a2v.step.3.x0.audio", Place(step=3, part="audio", quantity="denoised")),
        ("model_pre_a2v.step.0.x.video", Place(step=0, part="video", quantity="x")),
        ("model_pre_a2v.step.7.noise.video", Place(step=7, part="video", quantity="noise")),
        ("dequant_fp32.model_pre_a2v.block.1.audio", Place(part="audio")),
    ],
)
def test_the_place_of_a_stored_tensor_in_a_stage(name: str, place: Place) -> None:
    assert place_of(name, "step 3") == place
