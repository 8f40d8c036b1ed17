"""Presets: what is in the box loads, and a mistake in a file is one sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app import presets
from runtime.messages import Plan, Ref2VARequest, Reference

MODELS = '[models]\ndit = "d"\ntext_encoder = "t"\nvideo_vae = "v"\naudio_vae = "a"\n'


def request_from(folder: Path, text: str, **changes: object) -> Ref2VARequest:
    (folder / "r.toml").write_text(text)
    return presets.load_request(folder / "r.toml", id="x", changes=changes)


def plan_from(folder: Path, text: str) -> Plan:
    (folder / "mine.toml").write_text(text)
    return presets.load_plan(folder / "mine.toml")


@pytest.mark.parametrize("name", presets.names("requests"))
def test_every_request_preset_loads(name: str) -> None:
    assert presets.load_any_request(presets.find("requests", name), id="x").steps > 0


@pytest.mark.parametrize("name", presets.names("plans"))
def test_every_plan_preset_loads_under_its_own_name(name: str) -> None:
    assert presets.load_plan(presets.find("plans", name)).name == name


def test_the_reference_run_is_the_one_of_the_tables() -> None:
    request = presets.load_request(presets.find("requests", "reference_960x544_124f"), id="x")
    assert (request.width, request.height, request.frames, request.steps) == (960, 544, 124, 12)
    assert (request.sampler, request.scheduler, request.seed) == ("res_multistep", "beta", 440202)


def test_the_cpu_plan_names_the_demo_files_that_are_in_the_checkout() -> None:
    plan = presets.load_plan(presets.find("plans", "cpu"))
    assert presets.is_demo(plan) and plan.models.deepstack_layers == (0, 1, 2)
    for file in (plan.models.dit, plan.models.text_encoder, plan.models.video_vae):
        assert file.is_file()


def test_a_hardware_plan_is_not_the_demo() -> None:
    assert not presets.is_demo(presets.load_plan(presets.find("plans", "h200x1_sdpa")))


def test_model_paths_are_relative_to_the_plan_and_may_begin_with_home(tmp_path: Path) -> None:
    plan = plan_from(tmp_path, MODELS.replace('"t"', '"~/t"'))
    assert plan.models.dit == tmp_path / "d"
    assert plan.models.text_encoder == (Path.home() / "t").resolve()


def test_changes_from_the_command_line_win(tmp_path: Path) -> None:
    assert request_from(tmp_path, 'prompt = "a"\nsteps = 5', steps=7).steps == 7


def test_a_request_survives_being_written_and_read(tmp_path: Path) -> None:
    request = Ref2VARequest(
        id="x",
        prompt='tabs\t "quotes" \\ new\nlines \x7f \x01 日本 😀',
        references=(
            Reference(kind="image", path=tmp_path / "a b.png"),
            Reference(kind="video", path=tmp_path / "v.mp4", soundtrack=tmp_path / "s.wav"),
            Reference(kind="video", path=tmp_path / "w.mp4", mute=True),
        ),
        seed=2**64 - 1,
        shift_video=7.5,
    )
    assert request_from(tmp_path, presets.dump_request(request)) == request


def test_a_plan_survives_being_written_and_read(tmp_path: Path) -> None:
    plan = replace(presets.load_plan(presets.find("plans", "cpu")), threads=1)
    assert plan_from(tmp_path, presets.dump_plan(plan)) == plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz = 3", "unknown key 'stepz' in r.toml; allowed are prompt, width, height"),
        ("id = 'x'", "unknown key 'id'"),
        ("steps = '3'", "steps in r.toml must be a whole number, got '3'"),
        ("steps = true", "steps in r.toml must be a whole number, got True"),
        ("steps = 3.0", "steps in r.toml must be a whole number, got 3.0"),
        ("cfg = 'high'", "cfg in r.toml must be a number"),
        ("negative_references = 1", "negative_references in r.toml must be true or false"),
        ("prompt = 5", "prompt in r.toml must be text in quotes, got 5"),
        ("references = 'a.png'", "must be tables like [[references]]"),
        ("[[references]]\nkind = 'image'", "[[references]] path missing in r.toml"),
        ("[[references]]\nkind = 'gif'\npath = 'a'", "must be image, video or audio"),
        ("width = 100", "multiples of 32, got 100x544; the nearest is 96x544"),
        ("frames = 30", "frames must be 17k+5 between 5 and 3592, got 30; the next is 39"),
        ("steps = ", "is not valid TOML"),
        ("cfg = nan", "cfg must be -1000 to 1000, got nan"),
        ("cfg = inf", "cfg must be -1000 to 1000, got inf"),
        ("[[references]]\nkind = 'image'\npath = '~nosuchuser/a'", "~nosuchuser/a leads nowhere"),
    ],
)
def test_a_mistake_in_a_request_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        request_from(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "mine.toml has no table [models]"),
        ("[models]\ndit = 'd'", "[models] text_encoder, video_vae, audio_vae missing"),
        ("gpu = 1\n" + MODELS, "unknown key 'gpu' in mine.toml; allowed are name, family"),
        (MODELS + "lora = 'x'", "unknown key [models] 'lora'"),
        (MODELS + "deepstack_layers = [1, 2]", "three whole numbers like [0, 1, 2]"),
        ("device = 'tpu'\n" + MODELS, "plan field device must be one of cuda, cpu, got 'tpu'"),
        ("threads = -1\n" + MODELS, "threads must be 0 (torch's choice) to 4096, got -1"),
        ("threads = 5000\n" + MODELS, "threads must be 0 (torch's choice) to 4096, got 5000"),
        (MODELS.replace('"v"', '"~nosuchuser/v"'), "~nosuchuser/v leads nowhere"),
    ],
)
def test_a_mistake_in_a_plan_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        plan_from(tmp_path, text)
    assert "\n" not in str(error.value)


def test_an_unknown_preset_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no preset 'gpu' in presets/plans; there are cpu, h200x1"):
        presets.find("plans", "gpu")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere/p\.toml does not exist; give a TOML file or"):
        presets.find("plans", "nowhere/p.toml")
    with pytest.raises(ValueError, match="/dev/zero is not an ordinary file; give a TOML file"):
        presets.find("plans", "/dev/zero")


def test_a_loop_of_links_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match=r"/a leads nowhere \(.*loop.*\); check the path"):
        presets.user_path(tmp_path / "a")
    with pytest.raises(ValueError, match="leads nowhere"):
        plan_from(tmp_path, MODELS.replace('"t"', '"a"'))


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_half_of_a_surrogate_pair_is_no_text(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is not valid UTF-8 text"):
        Ref2VARequest(id="x", **({"prompt": ""} | {field: "a\udcffb"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["vae_tiles", "cache_warmup", "cache_max_run", "threads"])
@pytest.mark.parametrize("value", [2.5, 2.0, True, "2"])
def test_a_count_of_a_plan_made_in_code_is_a_whole_number(field: str, value: object) -> None:
    plan = presets.load_plan(presets.find("plans", "cpu"))
    with pytest.raises(ValueError, match=f"plan field {field} must be a whole number, got"):
        replace(plan, **{field: value})  # type: ignore[arg-type]
