"""LTX weights do not run before their licence was acknowledged, and what was is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import launch
from app import licences, runs
from app.access import User
from app.console import Console
from app.errors import Unacknowledged
from app.licences import LTX
from runtime.checkpoints.header import RANDOM_WEIGHTS, read_header
from runtime.ltx.published import TINY_CONFIG
from runtime.messages import LTXRequest
from tests.consoles import client, demo_plan, ltx_console, until
from tests.ltx_plans import plan_of, zeros

NAME = "/api/v1/licences"


def entries(root: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((root / licences.FILE).read_text())[
        "acknowledgements"
    ]
    return found


def test_the_first_use_is_refused_and_names_licence_date_and_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    with pytest.raises(Unacknowledged) as refused:
        licences.check(plan, tmp_path)
    for words in (
        "LTX-2.x Community License",
        "2026-08-11",
        "dit.safetensors",
        "--acknowledge-licence ltx-2.x",
    ):
        assert words in str(refused.value)
    assert "\n" not in str(refused.value) and not (tmp_path / licences.FILE).exists()


def test_the_terms_name_the_threshold_and_point_to_no_address() -> None:
    text = " ".join(LTX.terms)
    assert "USD 10 million" in text and "Acceptable Use Policy" in text
    assert "came with the weights" in text
    assert "http" not in text and "huggingface" not in text.lower()


def test_what_is_acknowledged_is_kept_with_time_version_and_metadata(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    licences.check(plan, tmp_path)
    (entry,) = entries(tmp_path)
    assert (entry["licence"], entry["date"], entry["by"]) == ("ltx-2.x", "2026-08-11", "ana")
    assert entry["metadata"] == "LTX-2.x Community License" and entry["version"] == LTX.version
    assert str(entry["acknowledged"]).startswith("20") and entry["file"] == "dit.safetensors"
    assert not list(tmp_path.glob("*.part"))


def test_missing_metadata_is_said_and_kept_as_missing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, None)
    assert "has no license metadata" in licences.missing(plan, tmp_path)
    licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    assert entries(tmp_path)[0]["metadata"] is None and not licences.missing(plan, tmp_path)


@pytest.mark.parametrize("other", [None, "another text"])
def test_weights_that_say_otherwise_are_asked_about_again(
    tmp_path: Path, other: str | None
) -> None:
    licences.acknowledge("ltx-2.x", plan_of(tmp_path), tmp_path, by="ana")
    changed = plan_of(tmp_path / "other", other)
    assert licences.missing(changed, tmp_path)
    licences.acknowledge("ltx-2.x", changed, tmp_path, by="ana")
    assert not licences.missing(changed, tmp_path) and len(entries(tmp_path)) == 2


def test_other_words_of_ours_are_asked_about_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path)
    licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    monkeypatch.setattr(licences, "LICENCES", (replace(LTX, terms=("Other words.",)),))
    assert licences.missing(plan, tmp_path)


def test_weights_of_make_demo_need_none_and_cannot_be_acknowledged(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RANDOM_WEIGHTS)
    assert licences.missing(plan, tmp_path) == ""
    with pytest.raises(ValueError, match="random weights of make-demo"):
        licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    assert licences.missing(plan_of(tmp_path, f"{RANDOM_WEIGHTS}!"), tmp_path)


OTHERS = ("video_vae", "audio_vae", "vocoder", "upsampler")
FILES = [f"{role}/model.safetensors" for role in OTHERS]


def says(folder: Path, license: str) -> None:
    """The folder's weights name a licence, as diffusers' own do not."""
    file = folder / "model.safetensors"
    tensors = {name: (one.dtype, one.shape) for name, one in read_header(file).tensors.items()}
    zeros(file, tensors, license=license)


@pytest.mark.parametrize("role", OTHERS)
@pytest.mark.parametrize("denoiser", [RANDOM_WEIGHTS, "LTX-2.x Community License"])
def test_a_folder_that_names_a_licence_is_asked_about_too(
    tmp_path: Path, denoiser: str, role: str
) -> None:
    plan = plan_of(tmp_path, denoiser)
    if denoiser != RANDOM_WEIGHTS:
        licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    licences.check(plan, tmp_path)
    says(tmp_path / role, "another text")
    with pytest.raises(Unacknowledged, match=rf"^{role}/model\.safetensors, whose header names"):
        licences.check(plan, tmp_path)
    licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    licences.check(plan, tmp_path)
    assert entries(tmp_path)[-1]["metadata"] == "another text"
    says(tmp_path / role, RANDOM_WEIGHTS)
    licences.check(plan, tmp_path)


def test_of_a_whole_text_the_beginning_is_told_and_no_length_that_is_not_its_own(
    tmp_path: Path,
) -> None:
    told = licences.missing(plan_of(tmp_path, "terms " * 1000), tmp_path)
    assert f"whose header names '{'terms ' * 13}te'..., is not to run before" in told


def test_the_text_encoder_has_terms_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, RANDOM_WEIGHTS)
    says(tmp_path / "text_encoder", "Gemma")
    assert licences.missing(plan, tmp_path) == ""


def test_folders_that_say_nothing_go_with_the_denoiser(tmp_path: Path) -> None:
    """With make-demo's tiny one they are of make-demo, which writes none around another."""
    licensed = plan_of(tmp_path / "licensed")
    licences.acknowledge("ltx-2.x", licensed, tmp_path, by="ana")
    assert [entry["file"] for entry in entries(tmp_path)] == ["dit.safetensors"]
    plan = plan_of(tmp_path / "random", RANDOM_WEIGHTS)
    assert [one.file for one in licences.look(plan)] == ["dit.safetensors"]
    header = read_header(plan.models.dit)
    tensors = {name: (one.dtype, one.shape) for name, one in header.tensors.items()}
    larger = json.dumps({"transformer": TINY_CONFIG | {"av_ca_timestep_scale_multiplier": 1.0}})
    zeros(plan.models.dit, tensors, **header.metadata | {"config": larger})
    assert [one.file for one in licences.needed(plan, tmp_path)] == FILES
    told = licences.missing(plan, tmp_path)
    assert f"and {FILES[3]}, whose header has no license metadata, are not to run before" in told
    licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    licences.check(plan, tmp_path)
    assert [entry["file"] for entry in entries(tmp_path)[1:]] == FILES


def test_a_folder_that_cannot_be_used_is_not_asked_about(tmp_path: Path) -> None:
    """Preflight refuses it, and sampling alone needs none."""
    plan = plan_of(tmp_path, RANDOM_WEIGHTS)
    for role in OTHERS:
        says(tmp_path / role, "another text")
    (tmp_path / "vocoder" / "config.json").unlink()
    h3s = demo_plan().models.video_vae  # a file of another family
    plan = replace(plan, models=replace(plan.models, video_vae=h3s, audio_vae=tmp_path / "gone"))
    assert [one.file for one in licences.needed(plan, tmp_path)] == [FILES[3]]


def test_h3_has_none(tmp_path: Path) -> None:
    plan = replace(demo_plan(), family="h3")
    assert licences.missing(plan, tmp_path) == ""
    with pytest.raises(ValueError, match="licence of family ltx"):
        licences.acknowledge("ltx-2.x", plan, tmp_path, by="ana")
    with pytest.raises(ValueError, match="no licence 'mit'"):
        licences.acknowledge("mit", plan, tmp_path, by="ana")


def test_a_damaged_file_is_one_sentence_and_lets_nothing_start(tmp_path: Path) -> None:
    (tmp_path / licences.FILE).write_text("{")
    with pytest.raises(ValueError, match="move it away and acknowledge again"):
        licences.check(plan_of(tmp_path), tmp_path)


def test_the_command_line_ends_with_2_and_shows_the_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "FOLDER", tmp_path / "runs")
    plan = plan_of(tmp_path)
    monkeypatch.setattr("app.presets.load_plan", lambda path: plan)
    out = tmp_path / "out"
    asked = ["generate", "--plan", "cpu", "--prompt", "x", "--out", str(out), "--no-media"]
    assert launch.main(asked) == 2
    told = capsys.readouterr().err
    assert "USD 10 million" in told and "is not to run before" in told.splitlines()[-1]
    assert not out.exists()
    assert launch.main([*asked, "--acknowledge-licence", "mit"]) == 2
    assert "no licence 'mit'" in capsys.readouterr().err


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    with ltx_console(tmp_path / "runs", plan_of(tmp_path)) as console:
        yield console


def test_the_page_is_told_what_is_needed_and_an_admin_acknowledges(console: Console) -> None:
    web = client(console)
    found = web.get(NAME).json()
    states = {one["plan"]: one for one in found["plans"]}
    assert states["mine"]["state"] == "needed" and "cpu" not in states
    assert states["mine"]["metadata"] == "LTX-2.x Community License"
    (licence,) = found["licences"]
    assert (licence["id"], licence["date"], licence["acknowledgements"]) == (
        "ltx-2.x",
        "2026-08-11",
        [],
    )
    body = {"licence": "ltx-2.x", "plan": "mine"}
    assert client(console, User(name="mia")).post(NAME, json=body).status_code == 403
    answer = web.post(NAME, json=body)
    assert answer.status_code == 201
    assert {one["plan"]: one["state"] for one in answer.json()["plans"]}["mine"] == "acknowledged"
    assert answer.json()["licences"][0]["acknowledgements"][0]["by"] == "local"
    shown = client(console, User(name="mia")).get(NAME).json()
    assert shown["licences"][0]["acknowledgements"][0]["by"] == ""


def test_the_page_is_told_of_every_file(console: Console, tmp_path: Path) -> None:
    web = client(console)

    def state() -> dict[str, object]:
        return next(one for one in web.get(NAME).json()["plans"] if one["plan"] == "mine")

    says(tmp_path / "vocoder", "another text")
    denoiser = {"file": "dit.safetensors", "metadata": "LTX-2.x Community License"}
    vocoder = {"file": "vocoder/model.safetensors", "metadata": "another text"}
    needed = state()
    assert (needed["state"], needed["files"]) == ("needed", [denoiser, vocoder])
    web.post(NAME, json={"licence": "ltx-2.x", "plan": "mine"})
    assert (state()["state"], state()["files"]) == ("acknowledged", [denoiser, vocoder])
    says(tmp_path / "vocoder", "a third text")
    assert state() == needed | {"files": [vocoder | {"metadata": "a third text"}]} | {
        "file": "vocoder/model.safetensors",
        "metadata": "a third text",
    }


def test_a_job_is_refused_with_428_until_then(console: Console, tmp_path: Path) -> None:
    web = client(console)
    body = {"request": {"family": "ltx", "prompt": "a calm sea"}, "plans": ["mine"], "force": True}
    refused = web.post("/api/v1/jobs", json=body)
    assert refused.status_code == 428 and "is not to run before" in refused.json()["detail"]
    assert not console.jobs.queue()
    web.post(NAME, json={"licence": "ltx-2.x", "plan": "mine"})
    assert web.post("/api/v1/jobs", json=body).status_code == 201
    (job,) = console.jobs.queue()
    assert isinstance(job.request, LTXRequest)


def test_a_worker_of_such_a_plan_is_never_started(console: Console, tmp_path: Path) -> None:
    until(lambda: console.session.engine_state().state == "ready")
    runner = console.session._runner
    assert not runner.load(plan_of(tmp_path))
    assert "is not to run before" in console.session.engine_state().reason
    assert console.session.engine_state().state == "failed" and runner._engine is None
