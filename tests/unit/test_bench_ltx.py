"""A benchmark of LTX tells its two stages apart, whole or sampling alone, and beside diffusers."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app import bench, measurements, presets, runs
from app.bench_ltx import LTX
from app.cli import bench as command
from app.stored import plain
from launch import main
from runtime.bench.base import Turn
from runtime.bench.ltx import RequestSubject, SamplingSubject, told_of_stages
from runtime.bench.ltx_base import LTXSetup, ltx_setup_of
from runtime.bench.ltx_peer import DiffusersSubject, forwards, noise
from runtime.ltx.demo import write_denoiser
from runtime.ltx.denoise import Velocity, nothing_clean, times_of
from runtime.ltx.denoiser import stages_of
from runtime.ltx.tiny_components import ComponentFolders
from runtime.messages import LTXRequest, ModelFiles, Plan

SMALL: dict[str, Any] = {"width": 128, "height": 128, "frames": 9, "fps": 24}
TOKENS = [
    {"steps": 8, "video": 8, "audio": 9, "text": 6},
    {"steps": 3, "video": 32, "audio": 9, "text": 6},
]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is kept in the test's folder, and other tests may measure meanwhile."""
    monkeypatch.setattr(runs, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, ltx_components: ComponentFolders) -> Plan:
    dit = tmp_path_factory.mktemp("ltx") / "dit.safetensors"
    write_denoiser(dit, size="tiny", format="nvfp4")
    models = ModelFiles(
        dit=dit,
        text_encoder=ltx_components.text_encoder,
        video_vae=ltx_components.video_vae,
        audio_vae=ltx_components.audio_vae,
        vocoder=ltx_components.vocoder,
        upsampler=ltx_components.upsampler,
    )
    choices = {"device": "cpu", "dtype": "fp32", "video_vae_dtype": "fp32", "threads": 1}
    return Plan(name="mine", models=models, family="ltx", **choices)  # type: ignore[arg-type]


def setup_of(plan: Plan, **changes: Any) -> LTXSetup:
    """As it arrives in the subject's process."""
    told = {
        "subject": "plan",
        "plan": plain(plan),
        "request": plain(LTXRequest(id="x", prompt="A boat.", **SMALL)),
        "text_rows": 0,
        "weights": "",
        "media": False,
        "out": "",
        "attention": "native",
        "known": False,
    }
    return ltx_setup_of(json.loads(json.dumps({**told, **changes})))


@pytest.fixture(scope="module")
def whole(plan: Plan) -> RequestSubject:
    return RequestSubject(setup_of(plan))


def alone(plan: Plan, **changes: Any) -> LTXSetup:
    return setup_of(plan, **{"text_rows": 6, "weights": "tiny:bf16", **changes})


def measured(subject: Any, name: str = "mine") -> bench.Measured:
    """Of a warm-up and a turn, as they cross to the parent."""
    ready = json.loads(json.dumps({"facts": subject.facts, "rows": subject.rows}))
    turns = [json.loads(json.dumps(plain(subject.turn()))) for _ in range(2)]
    return bench.Measured(
        name=name,
        facts=ready["facts"],
        rows=ready["rows"],
        warm_up=turns[0],
        turns=(turns[1],),
        gpu=(),
        profile=None,
    )


# ---- the subjects


def test_a_whole_request_tells_stages_of_steps_and_all_that_is_around_them(
    whole: RequestSubject,
) -> None:
    told = LTX.summary(measured(whole))
    assert [of["step_seconds"]["n"] for of in told["sampling"]] == [8, 3]
    assert [(of["video"], of["audio"], of["text"]) for of in told["sampling"]] == [
        (8, 9, 1024),
        (32, 9, 1024),
    ]
    for of in told["sampling"]:
        assert set(of["parts"]) == {"attention", "GEMM", "communication", "other"}
        assert of["parts"]["attention"]["min"] > 0 and of["parts"]["GEMM"]["min"] > 0
    around = ("text encode", "latent upsample", "video VAE decode", "audio VAE decode", "mux")
    assert all(told["stages"][name]["min"] > 0 for name in around)
    steps = sum(
        told["sampling"][n]["step_values"][0][k] for n, s in ((0, 8), (1, 3)) for k in range(s)
    )
    whole = steps + sum(one["median"] for one in told["stages"].values())
    assert told["denoise_seconds"]["median"] == pytest.approx(steps)
    assert told["outside_seconds"]["median"] == pytest.approx(told["seconds"]["median"] - whole)
    assert told["outside_seconds"]["median"] >= 0


def test_a_prompt_is_encoded_in_every_turn_unless_it_is_the_second_request(
    whole: RequestSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, asked = whole._pipeline.text, []
    tower = text.tower
    monkeypatch.setattr(text, "tower", lambda check: (asked.append("text"), tower(check))[1])
    whole.turn()
    whole.turn()
    assert len(asked) == 2
    monkeypatch.setattr(whole, "setup", replace(whole.setup, known=True))
    whole.turn()
    assert len(asked) == 2


def test_sampling_alone_needs_no_component_and_keeps_its_latents(
    plan: Plan, tmp_path: Path
) -> None:
    nowhere = {role: Path("nowhere") for role in ("text_encoder", "video_vae", "audio_vae")}
    bare = Plan(**{**vars_of(plan), "models": ModelFiles(dit=Path("nowhere"), **nowhere)})
    subject = SamplingSubject(alone(bare, out=str(tmp_path / "kept")))
    told = LTX.summary(measured(subject))
    assert [{k: of[k] for k in TOKENS[0]} for of in told["sampling"]] == TOKENS
    assert told["stages"] == {}
    assert told["resolved"]["upsampler"].startswith("not loaded")
    first, second = (
        load_file(tmp_path / "kept" / f"turn_{n}" / "latents.safetensors") for n in (1, 2)
    )
    assert first["video"].shape == (1, 16, 2, 4, 4) and torch.equal(first["video"], second["video"])


def test_text_rows_alone_sample_the_plan_s_own_denoiser(plan: Plan) -> None:
    subject = SamplingSubject(alone(plan, weights=""))
    assert subject.facts["resolved"]["nvfp4 markers"] == "header"
    assert [size["text"] for size in subject.rows] == [6, 6]


def test_diffusers_computes_the_very_same_velocities(plan: Plan) -> None:
    """The same tensors, sizes and times: else a ratio would compare two models."""
    ours, peer = SamplingSubject(alone(plan)), DiffusersSubject(alone(plan, subject="diffusers"))
    told = LTX.summary(measured(peer, "diffusers"))
    assert [{k: of[k] for k in TOKENS[0]} for of in told["sampling"]] == TOKENS
    assert [of["step_seconds"]["n"] for of in told["sampling"]] == [8, 3]
    contexts = ours._conditioning.contexts
    assert torch.equal(contexts.video_BLD, peer._contexts.video_BLD)
    for stage in stages_of(peer.setup.request):
        state = noise(peer.model.config, stage, peer.device)
        calls = forwards(peer.model, state, peer._contexts, stage)
        assert len(calls) == stage.steps
        velocity = Velocity(ours._denoiser.model, contexts, stage.shape.latent, stage.shape.fps)
        for sigma, call in zip(stage.sigmas, calls, strict=False):
            times = times_of(state, nothing_clean(state.video), torch.tensor(sigma))
            with torch.inference_mode():
                found, (video, audio) = velocity(state, times), call()
            assert far(found.video, video) < 2e-6 and far(found.audio, audio) < 2e-6


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def vars_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "tiny:pruned_bf16"}, "nvfp4, nvfp4_bare, bf16; got tiny of 'pruned_bf16'"),
        ({"weights": "huge:bf16"}, "full or tiny"),
    ],
)
def test_weights_that_are_not_ltx_s_are_refused(
    plan: Plan, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingSubject(alone(plan, **changes))


def test_what_the_peer_cannot_run_is_refused(plan: Plan) -> None:
    with pytest.raises(ValueError, match="needs a GPU and the plan's device is cpu"):
        DiffusersSubject(alone(plan, subject="diffusers", attention="_native_cudnn"))
    with pytest.raises(ValueError, match="give --random-weights bf16"):
        DiffusersSubject(alone(plan, subject="diffusers", weights=""))


# ---- what is told of them


def turn(stage_1: float, stage_2: float) -> dict[str, Any]:
    steps = [stage_1] * 8 + [stage_2] * 3
    return {
        "seconds": sum(steps) + 1.5,
        "steps": steps,
        "parts": {"GEMM": [one / 2 for one in steps]},
        "stages": {"mux": 0.25},
        "peak_allocated_bytes": 7,
        "peak_reserved_bytes": 8,
        "rows": TOKENS,
    }


def made(
    name: str, *turns: dict[str, Any], profile: dict[str, Any] | None = None
) -> bench.Measured:
    return bench.Measured(
        name=name,
        facts={"load_seconds": 1.0, "resolved": {}, "device_name": "cpu", "machine": {}},
        rows=TOKENS,
        warm_up=turn(9, 9),
        turns=turns,
        gpu=(),
        profile=profile,
    )


def test_the_stages_have_medians_and_ratios_of_their_own() -> None:
    a, b = made("a", turn(1, 4), turn(1.2, 5)), made("b", turn(2, 4), turn(3, 4))
    first, second = LTX.summary(a)["sampling"]
    assert (first["step_seconds"]["median"], second["step_seconds"]["median"]) == (1.1, 4.5)
    assert (first["parts"]["GEMM"]["max"], second["parts"]["GEMM"]["max"]) == (0.6, 2.5)
    assert "step_seconds" not in LTX.summary(a)
    assert LTX.summary(a)["outside_seconds"]["median"] == pytest.approx(1.25)
    ratios = LTX.ratios(a, b)
    assert ratios["stage 1"]["step"] == pytest.approx(2.5 / 1.1)
    assert ratios["stage 2"]["rounds"] == pytest.approx(
        {"median": 0.9, "min": 0.8, "max": 1.0, "n": 2}
    )
    assert LTX.words(turn(1, 4)) == (
        "stage 1 8 video + 9 audio tokens, 6 of text, 1.0000 s a step; "
        "stage 2 32 video + 9 audio tokens, 6 of text, 4.0000 s a step"
    )


def test_the_table_has_tokens_and_steps_of_each_stage() -> None:
    a, b = made("a", turn(1, 4)), made("b", turn(2, 4))
    text = "\n".join(LTX.lines([LTX.summary(a), LTX.summary(b)], LTX.ratios(a, b)))
    assert "stage 2, 3 steps  32 video + 9 audio tokens, 6 of text  32 video" in text
    assert "a step of stage 1 of b takes 2.000 times as long as one of a (2.000 to 2.000" in text


def test_subjects_of_different_tokens_are_not_compared() -> None:
    other = {**turn(1, 1), "rows": [{**TOKENS[0], "text": 7}, TOKENS[1]]}
    a, b = made("a", turn(1, 1)), made("b", turn(1, 1))
    LTX.same_size([a, b], [turn(1, 1), turn(2, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"different numbers of tokens .*7 of text"):
        LTX.same_size([a, b], [turn(1, 1), other])  # type: ignore[list-item]


def test_a_profile_is_that_of_the_first_step_of_each_stage() -> None:
    """Steps 1 and 9 of a trace in which step n has a kernel of n us."""
    trace: list[dict[str, Any]] = []
    for n in range(1, 12):
        at, of = 1000 * n, {"correlation": n}
        trace += [
            {"cat": "user_annotation", "name": f"denoise, step {n}", "ts": at, "dur": 50},
            {"cat": "cuda_runtime", "name": "launch", "ts": at + 1, "args": of},
            {"cat": "kernel", "name": "nvjet", "ts": at + 2, "dur": n, "args": of},
        ]
    taken = Turn(
        seconds=1.0,
        steps=tuple(n * 1e-5 for n in range(1, 12)),
        parts={},
        stages={},
        peak_allocated_bytes=0,
        peak_reserved_bytes=0,
    )
    found = told_of_stages(taken, trace, [8, 3])
    assert [found[f"stage {n}"]["seconds"]["GEMM"] for n in (1, 2)] == pytest.approx([1e-6, 9e-6])
    assert [found[f"stage {n}"]["step_seconds"] for n in (1, 2)] == pytest.approx([1e-5, 9e-5])
    summary = LTX.summary(made("a", turn(1, 4), profile=dict(found)))
    assert "profile" not in summary and summary["sampling"][1]["profile"] == found["stage 2"]
    assert any(
        line.startswith("a: one profiled step of stage 2, of")
        for line in LTX.lines([summary], None)
    )


# ---- the command


def test_two_plans_take_turns_and_the_console_hears_of_each_stage(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(presets.dump_plan(plan))
    mine = str(tmp_path / "mine.toml")
    asked = ["--plan", mine, "--against", mine, "--request", "ltx_demo", "--runs", "1"]
    random = ["--random-weights", "nvfp4", "--random-size", "tiny", "--text-rows", "6"]
    record = tmp_path / "records.jsonl"
    assert main(["bench", *asked, *random, "--record-to", str(record)]) == 0
    said = capsys.readouterr()
    assert "note: sampling alone, as with --no-decode: random weights have no" in said.err
    told = json.loads(said.out.splitlines()[-1])
    assert (told["order"], told["text_rows"], "rows" in told) == ("A B", 6, False)
    assert [(one["stage"], one["video"], one["audio"]) for one in told["tokens"]] == [
        (1, 12, 18),
        (2, 48, 18),
    ]
    assert set(told["ratio"]) == {"stage 1", "stage 2"}
    assert json.loads(record.read_text()) == told
    (shown,) = measurements.listed(tmp_path / "runs", published=tmp_path / "none")
    assert [one["name"] for one in shown["subjects"]] == [
        "mine, stage 1 (12 + 18 tokens)",
        "mine (B), stage 1 (12 + 18 tokens)",
        "mine, stage 2 (48 + 18 tokens)",
        "mine (B), stage 2 (48 + 18 tokens)",
    ]
    medians = [one["step_seconds"]["median"] for one in shown["subjects"]]
    sampling = [one["sampling"] for one in told["subjects"]]
    assert medians == [of[n]["step_seconds"]["median"] for n in (0, 1) for of in sampling]
    assert [(one["of"], one["second"]) for one in shown["ratios"]] == [
        ("stage 1", "mine (B)"),
        ("stage 2", "mine (B)"),
    ]
    assert (shown["shape"]["family"], shown["shape"]["fps"], shown["shape"]["cfg"]) == (
        "ltx",
        24,
        1.0,
    )


REFUSED = {
    (): "give --request, or --random-weights such as bf16",
    ("--request", "demo"): "demo.toml is a request of family h3; give one of ltx",
    ("--request", "ltx_demo", "--no-decode"): "--no-decode belongs to --text-rows or --random",
    ("--request", "ltx_demo", "--peer", "diffusers"): "random weights of LTX; give --random",
    ("--random-weights", "bf16", "--steps", "4"): "steps cannot be given for LTX-2.5",
    ("--request", "ltx_demo", "--steps", "4"): "steps cannot be given for LTX-2.5",
    ("--random-weights", "bf16", "--against", "cpu"): "for LTX-2.5 and plan cpu runs MiniMax H3",
    ("--random-weights", "bf16", "--runs", "0"): "--runs must be 1 to 1000",
}  # fmt: skip


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_measured_is_told_in_one_sentence(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--plan", "ltx_cpu", *options]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("launch.py bench: ")
    assert REFUSED[options] in sentence


def test_weights_whose_licence_nobody_acknowledged_do_not_run(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Plan] = []
    monkeypatch.setattr("app.licences.check", lambda of, root: asked.append(of))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    request = LTXRequest(id="x", prompt="")
    for options, wanted in (("--text-rows 6", 1), ("--random-weights bf16", 0)):
        asked.clear()
        args = parser.parse_args(["--plan", "x", *options.split()])
        command._setups(args, LTX, plan, request)
        assert len(asked) == wanted
