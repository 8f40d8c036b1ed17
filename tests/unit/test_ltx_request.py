"""Requests and plans of family ltx: their limits, their TOML, their JSON, and H3's beside them."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import launch
from app import families, ltx_planning, models, plan_fields, preflight, presets, records, stored
from app.history import History
from app.job import job_of, row_of
from app.jobs import Job
from runtime import rank
from runtime.checkpoints.header import RANDOM_WEIGHTS
from runtime.families import FAMILIES
from runtime.ltx.attention import OPEN
from runtime.ltx.schedule import STAGE1_SIGMAS, STAGE2_SIGMAS
from runtime.messages import (
    LTX_ATTENTION,
    LTX_LEAVES,
    LTX_ONLY,
    LTX_STAGE_STEPS,
    LTXRequest,
    Plan,
    Ref2VARequest,
    Reference,
)
from runtime.parity.plans import read_plan
from tests.consoles import demo_plan
from tests.ltx_plans import plan_of


def other_values() -> dict[str, Any]:
    """A value that is not the default, of the fields that LTX has no use for and that have one."""
    found: dict[str, Any] = {}
    for field in plan_fields.plan_fields():
        values: dict[str, tuple[Any, ...]] = {
            "switch": (True, False),
            "whole number": (1, 2),
            "number": (0.5,),
            "text": ("1:2",),
            **dict.fromkeys(("attention", "linear", "elementwise"), ("triton", "fp8_rowwise")),
        }
        for value in field.values or values.get(field.kind, ()):
            if field.name in LTX_LEAVES and value != field.default and allowed(field.name, value):
                found[field.name] = value
    return found


def allowed(name: str, value: Any) -> bool:
    """In a plan of another family, alone."""
    try:
        replace(demo_plan(), **{name: value})
    except ValueError:
        return name in ("graphs", "overlap", "gather", "amax")  # only together with others
    return True


OTHERS = other_values()


@pytest.fixture
def ltx(tmp_path: Path) -> Plan:
    return plan_of(tmp_path / "models", RANDOM_WEIGHTS)


# ---- requests


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 96}, "multiples of 64 for LTX, got 96x512; the nearest is 128x512"),
        ({"height": 0}, "must be 64 to 4096"),
        ({"width": 8192}, "must be 64 to 4096"),
        (
            {"frames": 120},
            "frames must be 8k+1 between 9 and 1201 for LTX, got 120; the next is 121",
        ),
        ({"frames": 1}, "the next is 9"),
        ({"frames": 1209}, "the next is 1201"),
        ({"fps": 7}, "fps must be 8 to 60, got 7"),
        ({"fps": 61}, "fps must be 8 to 60, got 61"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64 - 1}, "seed must be 0 to 2^64-10001"),
        ({"prompt": "\ud800"}, "not valid UTF-8"),
        ({"family": "h3"}, "must be ltx, got 'h3'"),
    ],
)
def test_a_request_out_of_its_limits_is_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        LTXRequest(**({"id": "x", "prompt": "a"} | change))
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("frames", [9, 17, 121, 1201])
def test_the_limits_themselves_are_allowed(frames: int) -> None:
    for fps, side in ((8, 64), (60, 4096)):
        LTXRequest(id="x", prompt="", width=side, height=side, frames=frames, fps=fps)


def test_a_request_tells_what_lists_and_history_ask_of_any(tmp_path: Path) -> None:
    request = LTXRequest(id="x", prompt="a", image=tmp_path / "a.png")
    assert request.references == (Reference(kind="image", path=tmp_path / "a.png"),)
    assert replace(request, image=None).references == ()
    assert (request.steps, request.cfg) == (11, 1.0)
    assert Ref2VARequest(id="x", prompt="a").family == "h3"


def test_the_steps_are_those_of_the_schedules() -> None:
    assert (len(STAGE1_SIGMAS) - 1, len(STAGE2_SIGMAS) - 1) == LTX_STAGE_STEPS


def test_a_request_survives_being_written_and_read(tmp_path: Path) -> None:
    request = LTXRequest(
        id="x",
        prompt='a "b"\n日本',
        image=tmp_path / "a b.png",
        width=64,
        frames=17,
        fps=25,
        seed=3,
    )
    for one in (request, replace(request, image=None)):
        (tmp_path / "r.toml").write_text(presets.dump_request(one))
        assert presets.load_any_request(tmp_path / "r.toml", id="x") == one
        assert stored.request_of(json.loads(stored.dump(one))) == one


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('family = "ltx"\nsteps = 3', "unknown key 'steps'"),
        ('family = "ltx"\n[[references]]\nkind = "image"\npath = "a"', "unknown key 'references'"),
        ('family = "wan"', "family must be one of h3, ltx, got 'wan'"),
        ('family = "ltx"\nfps = 23.976', "fps in r.toml must be a whole number"),
        ("image = 'a.png'", "unknown key 'image'"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError) as refused:
        presets.load_any_request(tmp_path / "r.toml", id="x")
    assert words in str(refused.value)


def test_a_command_for_h3_takes_no_request_of_ltx(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a request of family ltx; give one of h3"):
        presets.load_request(presets.find("requests", "ltx_demo"), id="x")


def test_a_stored_job_without_a_family_is_one_of_h3() -> None:
    request = Ref2VARequest(id="x", prompt="a")
    assert "family" not in stored.plain(request)
    data = stored.plain(request)
    assert stored.request_of(data) == request
    plan = stored.plain(demo_plan())
    for name in LTX_ONLY:  # as an older console has written it
        del plan[name]
    for part in ("vocoder", "upsampler"):
        del plan["models"][part]
    assert stored.plan_of(plan) == demo_plan()


def test_a_job_of_ltx_survives_the_job_store(ltx: Plan, tmp_path: Path) -> None:
    request = LTXRequest(id="a", prompt="x", image=tmp_path / "p.png")
    job = Job(id="a", kind="generate", owner="o", plan=ltx, request=request, task={}, created=1.0)
    assert job_of(row_of(job)) == job  # type: ignore[arg-type]


# ---- plans


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_apply_is_refused_and_not_ignored(ltx: Plan, name: str) -> None:
    with pytest.raises(ValueError, match=f"plan field {name} must be .* for family ltx, got"):
        replace(ltx, **{name: OTHERS[name]})


def test_every_field_is_either_of_use_or_must_stay() -> None:
    used = {
        *("name", "models", "family", "device", "dtype", "attention", "nvfp4", "weights"),
        *("video_vae_dtype", "text_encoder", "threads", "kernel_times", *LTX_ONLY),
    }
    assert used | set(LTX_LEAVES) == {f.name for f in fields(Plan)}
    assert not used & set(LTX_LEAVES)
    assert set(LTX_LEAVES) - set(OTHERS) == {"vae_blend"}  # which has one value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": "sol"}, "got 'sol': not validated on LTX yet"),
        ({"attention": "fa4"}, "got 'fa4': not validated on LTX yet"),
        ({"text_encoder": "layers"}, "resident, stream for family ltx"),
        ({"video_vae_dtype": "fp16"}, "one of bf16, fp32, got 'fp16'"),
        ({"v2a_source": "a2v"}, "pre_a2v, post_a2v"),
        ({"ltx_rope_seconds": "x"}, "divide, multiply"),
        ({"ltx_tables": "bf16"}, "fp32, comfy"),
        ({"ltx_rounding": "once"}, "model, comfy"),
    ],
)
def test_a_value_that_is_not_open_is_refused(ltx: Plan, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        replace(ltx, **change)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v2a_source", "post_a2v"),
        ("ltx_rope_seconds", "multiply"),
        ("ltx_tables", "comfy"),
        ("ltx_rounding", "comfy"),
    ],
)
def test_ltx_s_own_fields_belong_to_no_other_family(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"plan field {name} belongs to family ltx, got"):
        replace(demo_plan(), **{name: value})


def test_the_plan_allows_the_attention_that_the_loader_opens() -> None:
    assert LTX_ATTENTION == OPEN


def test_a_plan_survives_being_written_and_read(ltx: Plan, tmp_path: Path) -> None:
    plan = replace(ltx, v2a_source="post_a2v", ltx_rope_seconds="multiply", ltx_tables="comfy")
    (tmp_path / "mine.toml").write_text(presets.dump_plan(plan))
    assert presets.load_plan(tmp_path / "mine.toml") == plan
    assert stored.plan_of(json.loads(stored.dump(plan))) == plan


def test_a_file_that_leaves_a_field_out_has_the_default_of_its_family(
    ltx: Plan, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(presets.dump_plan(ltx).replace('video_vae_dtype = "fp32"', ""))
    for read in (presets.load_plan(path), read_plan(str(path))):
        assert read.video_vae_dtype == "bf16"
    assert Plan.of(name="x", models=ltx.models).video_vae_dtype == "fp16"


# ---- the table of families, preflight, planner


def test_the_table_has_every_family_that_runs() -> None:
    assert {families.named(name).name for name in FAMILIES} == {"h3", "ltx"}


def test_request_and_plan_must_be_of_one_family(ltx: Plan, tmp_path: Path) -> None:
    h3, other = Ref2VARequest(id="x", prompt=""), LTXRequest(id="x", prompt="")
    with pytest.raises(ValueError, match=r"for LTX-2.5 and plan cpu runs MiniMax H3"):
        preflight.check(other, replace(demo_plan(), family="h3"), tmp_path, media=False)
    with pytest.raises(ValueError, match=r"for MiniMax H3 and plan mine runs LTX-2.5"):
        preflight.check(h3, ltx, tmp_path, media=False)
    preflight.check(other, ltx, tmp_path, media=False)
    with pytest.raises(ValueError, match=r"family must be one of h3, ltx, got 'wan'"):
        preflight.check(other, replace(demo_plan(), family="wan"), tmp_path, media=False)
    Image.new("RGB", (1, 9)).save(tmp_path / "thin.png")
    with pytest.raises(ValueError, match=r"thin\.png has 1x9 pixels.* needs 2 or more"):
        preflight.check(replace(other, image=tmp_path / "thin.png"), ltx, tmp_path, media=False)


def test_a_missing_folder_of_the_demo_says_how_it_is_made(
    ltx: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tmp_path / "models" / "vocoder")
    with pytest.raises(ValueError, match="vocoder, which is not there") as refused:
        preflight.check(LTXRequest(id="x", prompt=""), ltx, tmp_path, media=False)
    assert "make-demo" not in str(refused.value)
    monkeypatch.setattr(presets, "LTX_DEMO", tmp_path / "models")
    with pytest.raises(ValueError, match=r"vocoder, which is not there.*make-demo --family ltx"):
        preflight.check_models(replace(ltx, name="demo"))
    nameless = replace(ltx, models=replace(ltx.models, upsampler=None))
    with pytest.raises(ValueError, match="plan mine names no upsampler"):
        preflight.check_models(replace(nameless, models=replace(nameless.models, vocoder=tmp_path)))


def test_rows_are_the_tokens_of_the_contract(ltx: Plan) -> None:
    for width, height, tokens in ((768, 512, 6144), (1536, 1024, 24576), (1920, 1088, 32640)):
        request = LTXRequest(id="x", prompt="", width=width, height=height)
        rows = ltx_planning.rows(request, ltx_planning.measured(request, ltx, models.look(ltx)))
        assert (rows.video, rows.audio, rows.text) == (tokens, 126, 1024)
        assert rows.total == tokens + 126


def test_history_tells_requests_apart_by_what_costs_time(ltx: Plan, tmp_path: Path) -> None:
    history, request = History(), LTXRequest(id="x", prompt="a")
    history.add(request, ltx, {"denoise": 2.0, "end to end": 3.0, "load": 1.0})
    assert history.typical(replace(request, prompt="b", seed=1, id="y"), ltx)
    for change in ({"fps": 25}, {"frames": 17}, {"image": tmp_path}, {"width": 128}):
        assert history.typical(replace(request, **change), ltx) is None  # type: ignore[arg-type]


def test_timings_name_what_the_recipe_decides_and_the_first_frame(ltx: Plan) -> None:
    request = stored.plain(LTXRequest(id="x", prompt="a", image=Path("/secret/p.png")))
    record = {
        "id": "x",
        "state": "done",
        "stages": [],
        "engine": None,
        "result": None,
        "request": request,
        "plan": stored.plain(ltx),
        "failure": None,
    }
    shape = records.timings(record, live=False)["shape"]
    assert (shape["steps"], shape["fps"], shape["references"]) == (11, 24, ["image"])
    assert records.without_folders(record)["request"]["image"] == "p.png"


# ---- commands that know H3 alone


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sweep --text-rows 300", "for MiniMax H3 and plan mine runs LTX-2.5"),
        ("gate --against baseline", "plans of family h3 alone, and plan mine is of family ltx"),
    ],
)
def test_a_command_that_knows_h3_alone_says_so(
    ltx: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    (tmp_path / "mine.toml").write_text(presets.dump_plan(ltx))
    assert launch.main([*command.split(), "--plan", str(tmp_path / "mine.toml")]) == 2
    assert words in capsys.readouterr().err


def test_ranks_of_torchrun_start_no_weights_that_nobody_acknowledged(
    ltx: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(presets.dump_plan(ltx))
    (tmp_path / "r.toml").write_text('prompt = "x"\n')
    files = ["--plan", str(tmp_path / "mine.toml"), "--request", str(tmp_path / "r.toml")]
    assert rank.main([*files, "--out", str(tmp_path / "out")]) == 2
    assert "runtime.rank knows plans of family h3 alone" in capsys.readouterr().err
