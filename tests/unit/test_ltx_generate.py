"""Family ltx from a prompt and a first frame to an mp4 with sound, on tiny random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import launch
from app import presets, runs
from app.console import Console
from runtime.cancel import Cancelled
from runtime.checkpoints.header import RANDOM_WEIGHTS
from runtime.clock import DENOISE, STAGES, StageClock
from runtime.ltx.demo import write_denoiser
from runtime.ltx.folders import SAMPLE_RATE
from runtime.ltx.pipeline import Pipeline, load
from runtime.ltx.rendering import as_long, read_latents
from runtime.media.mp4 import read_run_metadata
from runtime.messages import (
    Event,
    LTXRequest,
    ModelFiles,
    Note,
    Plan,
    Progress,
    Ref2VARequest,
    Result,
    StageTime,
)
from tests.consoles import client, ended

PROMPT = "A small boat crosses a calm bay."
DIT = "random_tiny_ltx_dit_nvfp4.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What make-demo writes."""
    out = tmp_path_factory.mktemp("ltx_demo")
    assert launch.main(["make-demo", "--family", "ltx", "--size", "tiny", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    models = ModelFiles(
        dit=folder / DIT,
        text_encoder=folder / "text_encoder",
        video_vae=folder / "vae",
        audio_vae=folder / "audio_vae",
        vocoder=folder / "vocoder",
        upsampler=folder / "latent_upsampler",
    )
    return Plan(
        name="mine",
        models=models,
        family="ltx",
        device="cpu",
        dtype="fp32",
        video_vae_dtype="fp32",
        text_encoder="resident",
        threads=1,
    )


@pytest.fixture(scope="module")
def pipeline(plan: Plan) -> Pipeline:
    return loaded(plan)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "boat.png"
    ramp = np.linspace(0, 255, 160, dtype=np.uint8)
    Image.fromarray(np.stack([np.tile(ramp, (90, 1))] * 3, axis=-1)).save(path)
    return path


def loaded(plan: Plan) -> Pipeline:
    return load(plan, progress=lambda stage, done, total: None)


def request_of(**changes: Any) -> LTXRequest:
    small: dict[str, Any] = {"width": 64, "height": 128, "frames": 9}
    return LTXRequest(**{"id": "x", "prompt": PROMPT, **small, **changes})


def ran(
    pipeline: Pipeline, out: Path, request: LTXRequest, *, media: bool = True, stop: int = 99
) -> tuple[Result, list[Event]]:
    """stop: cancelled once so many steps are done."""
    events: list[Event] = []
    clock = StageClock("cpu")

    def steps() -> int:
        done = [e.done for e in events if isinstance(e, Progress) and e.stage == DENOISE]
        return max(done, default=0)

    out.mkdir(exist_ok=True)
    result = pipeline.generate(
        request,
        out=out,
        media=media,
        preview=False,
        emit=events.append,
        cancelled=lambda: steps() >= stop,
        clock=clock,
    )
    return result, [*events, *clock.times()]


def latents_of(pipeline: Pipeline, out: Path, **changes: Any) -> dict[str, Tensor]:
    result, _ = ran(pipeline, out, request_of(**changes), media=False)
    assert result.latents is not None
    return load_file(result.latents)


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def frames_of(path: Path) -> NDArray[np.uint8]:
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def test_a_picture_and_a_prompt_become_an_mp4_with_sound(
    pipeline: Pipeline, picture: Path, tmp_path: Path
) -> None:
    result, events = ran(pipeline, tmp_path / "out", request_of(image=picture, frames=17, fps=25))
    assert result.video is not None
    with av.open(str(result.video)) as file:
        (video,), (sound,) = file.streams.video, file.streams.audio
        assert (video.width, video.height, video.frames, video.average_rate) == (64, 128, 17, 25)
        assert (sound.rate, sound.channels) == (48_000, 2)
        assert abs(float(sound.duration * sound.time_base) - 17 / 25) < 0.03
    tensors = load_file(result.latents or Path())
    assert tensors["video"].shape == (1, 16, 3, 4, 2) and tensors["audio"].shape == (1, 8, 17, 16)
    assert any("the first frame, 160x90, is cut to its middle 45x90" in n for n in notes(events))
    assert "41 tokens at full size: 24 of video, 17 of sound" in notes(events)


def test_the_first_frame_holds_the_first_latent(
    pipeline: Pipeline, picture: Path, tmp_path: Path
) -> None:
    a = latents_of(pipeline, tmp_path / "a", image=picture, seed=1)["video"]
    b = latents_of(pipeline, tmp_path / "b", image=picture, seed=2)["video"]
    assert torch.equal(a[:, :, 0], b[:, :, 0]) and not torch.equal(a[:, :, 1], b[:, :, 1])
    free = latents_of(pipeline, tmp_path / "c", seed=1)["video"]
    assert not torch.equal(a[:, :, 0], free[:, :, 0])


def test_all_eleven_steps_are_counted_in_one_with_their_stage(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    _, events = ran(pipeline, tmp_path / "out", request_of(), media=False)
    steps = [e for e in events if isinstance(e, Progress) and e.stage == DENOISE]
    # 8 twice: the second says the size of the second stage, once the latents are doubled
    counted = [*range(9), *range(8, 12)]
    assert [(e.done, e.total) for e in steps] == [(n, 11) for n in counted]
    assert {e.detail for e in steps[:9]} == {"stage 1, 32x64"}
    assert {e.detail for e in steps[9:]} == {"stage 2, 64x128"}
    times = [e for e in events if isinstance(e, StageTime)]
    assert [e.step for e in times if e.stage == DENOISE] == list(range(11))
    assert {e.stage for e in times if e.stage in STAGES} == {
        *("text encode", "denoise", "latent upsample", "video VAE decode", "audio VAE decode"),
        "mux",
    }
    of_a_step = {e.stage: e.seconds for e in times if e.step == 4}
    parts = of_a_step["attention"] + of_a_step["GEMM"] + of_a_step["other"]
    assert of_a_step["GEMM"] > 0 and of_a_step["attention"] > 0
    assert parts == pytest.approx(of_a_step["denoise"], rel=1e-6)


def test_a_seed_gives_its_bits_again_and_another_one_others(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    a, b, c = (
        latents_of(pipeline, tmp_path / name, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for stream in ("video", "audio"):
        assert torch.equal(a[stream], b[stream]) and not torch.equal(a[stream], c[stream])


@pytest.mark.parametrize(
    "change",
    [
        {"text_encoder": "stream"},
        {"weights": "cached"},
        {"kernel_times": False},
    ],
)
def test_where_weights_lie_and_what_is_measured_changes_no_bit(
    pipeline: Pipeline, plan: Plan, tmp_path: Path, change: dict[str, Any]
) -> None:
    want = latents_of(pipeline, tmp_path / "a")
    other = loaded(replace(plan, **change))
    for name in ("b", "again"):  # a streamed encoder is let go and comes again
        found = latents_of(other, tmp_path / name)
        assert all(torch.equal(found[stream], want[stream]) for stream in want)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"v2a_source": "post_a2v"}, ("v2a source", "post_a2v")),
        ({"ltx_tables": "comfy", "dtype": "bf16"}, ("adaln tables", "comfy")),
        ({"ltx_rounding": "comfy", "dtype": "bf16"}, ("rounding", "comfy")),
        ({"ltx_rounding": "comfy"}, ("rounding", "comfy")),
    ],
)
def test_a_switch_of_the_plan_changes_the_result_and_is_told(
    pipeline: Pipeline,
    plan: Plan,
    tmp_path: Path,
    change: dict[str, str],
    told: tuple[str, str],
) -> None:
    usual = loaded(replace(plan, dtype=change.get("dtype", "fp32")))
    other = loaded(replace(plan, **change))  # type: ignore[arg-type]
    a, b = latents_of(usual, tmp_path / "a"), latents_of(other, tmp_path / "b")
    assert not torch.equal(a["audio"], b["audio"])
    assert other.resolved[told[0]] == told[1] != usual.resolved[told[0]]


def test_the_rope_s_seconds_are_a_switch_that_is_told(plan: Plan, tmp_path: Path) -> None:
    other = loaded(replace(plan, ltx_rope_seconds="multiply"))
    assert other.resolved["rope seconds"] == "multiply"
    a, b = (
        latents_of(pipeline, tmp_path / name, fps=50, frames=49)
        for pipeline, name in ((other, "a"), (loaded(plan), "b"))
    )
    assert not torch.equal(a["video"], b["video"])


@pytest.mark.parametrize("stop", [1, 8, 10])
def test_cancel_is_heard_before_a_step_of_either_stage(
    pipeline: Pipeline, tmp_path: Path, stop: int
) -> None:
    with pytest.raises(Cancelled):
        ran(pipeline, tmp_path / "out", request_of(), stop=stop)
    assert not list((tmp_path / "out").iterdir())


def test_the_tags_say_that_it_was_generated_and_the_record_stays_beside_them(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    result, _ = ran(pipeline, tmp_path / "out", request_of())
    assert result.video is not None
    with av.open(str(result.video)) as file:
        tags = dict(file.metadata)
    assert tags["comment"] == "AI-generated, model LTX-2.5 with random weights"
    assert (tags["ai_generated"], tags["model_license"]) == ("true", RANDOM_WEIGHTS)
    record = read_run_metadata(result.video)
    assert record["request"]["family"] == "ltx" and record["request"]["fps"] == 24
    resolved = record["resolved"]
    assert (resolved["license"], resolved["model version"]) == (RANDOM_WEIGHTS, "2.5.0")
    assert resolved["keyframes embedding"] == "present"
    assert (resolved["v2a source"], resolved["rope seconds"]) == ("pre_a2v", "divide")


def test_what_the_file_lacks_is_said_of_every_run(plan: Plan, folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    write_denoiser(bare, size="tiny", format="nvfp4_bare")
    models = replace(plan.models, dit=bare)
    other = loaded(replace(plan, models=models, ltx_nvfp4_order="high_tiled"))
    _, events = ran(other, tmp_path / "out", request_of(), media=False)
    said = " | ".join(notes(events))
    assert "no keyframes_abs_pos_embedding; it counts as zeros" in said
    assert other.resolved["keyframes embedding"] == "absent, counted as zeros"


def test_decoding_the_latents_gives_the_frames_of_the_run(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    result, _ = ran(pipeline, tmp_path / "out", request_of(fps=25))
    assert result.latents is not None and result.video is not None
    again = tmp_path / "again.mp4"
    pipeline.decode(
        "d",
        result.latents,
        out=again,
        emit=lambda event: None,
        cancelled=lambda: False,
        clock=StageClock("cpu"),
    )
    assert np.array_equal(frames_of(again), frames_of(result.video))
    with av.open(str(again)) as file:
        assert file.streams.video[0].average_rate == 25
        assert file.metadata["comment"].startswith("AI-generated")


@pytest.mark.parametrize(
    ("video", "audio", "metadata", "words"),
    [
        ((1, 24, 2, 4, 2), (1, 8, 9, 16), {}, "[1,16,F,h,w]"),
        ((1, 16, 2, 4, 2), (1, 32, 2, 9), {}, "[1,8,A,16]"),
        ((1, 16, 2, 4, 2), (1, 8, 9, 16), {}, "does not tell its frames a second"),
        ((1, 16, 2, 4, 2), (1, 8, 9, 16), {"ltx_request": '{"fps": 0}'}, "says fps 0"),
        (
            (1, 16, 2, 4, 2),
            (1, 8, 9, 16),
            {"ltx_request": '{"fps": 1000000000000000000000}'},
            "says fps 1000000000000000000000; it must be a whole number from 8 to 60",
        ),
    ],
)
def test_latents_that_cannot_be_decoded_are_one_sentence(
    tmp_path: Path,
    video: tuple[int, ...],
    audio: tuple[int, ...],
    metadata: dict[str, str],
    words: str,
) -> None:
    path = tmp_path / "latents.safetensors"
    save_file({"video": torch.zeros(video), "audio": torch.zeros(audio)}, path, metadata)
    with pytest.raises(ValueError) as refused:
        read_latents(path, 16)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_request_of_h3_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot run a request of h3"):
        ran(pipeline, tmp_path / "out", Ref2VARequest(id="x", prompt=""))  # type: ignore[arg-type]


@pytest.mark.parametrize(("more", "words"), [(-48, "silence"), (0, ""), (48, "cut off")])
def test_the_sound_ends_with_the_pictures(more: int, words: str) -> None:
    wave = torch.rand(1, 2, SAMPLE_RATE + more) + 0.5
    fitted, note = as_long(wave, SAMPLE_RATE)
    assert fitted.shape == (1, 2, SAMPLE_RATE)
    assert (words in note) if words else not note
    kept = min(SAMPLE_RATE, SAMPLE_RATE + more)
    assert torch.equal(fitted[..., :kept], wave[..., :kept])
    assert not fitted[..., kept:].any() and ("1 ms" in note) == (more != 0)


def toml(plan: Plan, folder: Path) -> Path:
    path = folder / "mine.toml"
    path.write_text(presets.dump_plan(plan))
    return path


def test_the_command_line_makes_and_decodes_it(
    plan: Plan,
    picture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runs, "FOLDER", tmp_path / "runs")
    out, file = tmp_path / "out", str(toml(plan, tmp_path))
    asked = ["generate", "--plan", file, "--request", "ltx_demo", "--image", str(picture)]
    sizes = ["--width", "64", "--height", "64", "--frames", "9", "--fps", "30", "--out", str(out)]
    assert launch.main([*asked, *sizes]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["state"] == "done" and Path(told["video"]).is_file()
    record = json.loads((out / "run.json").read_text())
    assert record["request"]["image"] == str(picture) and record["request"]["fps"] == 30
    assert record["engine"]["resolved"]["license"] == RANDOM_WEIGHTS
    again = tmp_path / "again.mp4"
    assert launch.main(["decode", str(out / "latents.safetensors"), "--out", str(again)]) == 0
    assert np.array_equal(frames_of(again), frames_of(out / "result.mp4"))


@pytest.fixture
def console(plan: Plan, tmp_path: Path) -> Iterator[Console]:
    """A console over the real family."""
    with Console(tmp_path / "runs", plan) as console:
        yield console


def test_the_console_makes_it_and_can_read_its_settings_back(
    console: Console, picture: Path
) -> None:
    web = client(console)
    with picture.open("rb") as stream:
        media = console.media.add("local", picture.name, stream)
    asked = {"family": "ltx", "prompt": PROMPT, "image": media.id, "width": 64, "height": 64}
    body = {"request": asked | {"frames": 9}, "plans": ["mine"], "force": True}
    made = web.post("/api/v1/jobs", json=body)
    assert made.status_code == 201, made.text
    job = ended(console, made.json()["jobs"][0]["id"])
    assert (job.state, job.reason) == ("done", "")
    found = web.get(f"/api/v1/runs/{job.id}").json()
    assert found["job"]["references"][0]["name"] == picture.name
    assert found["engine"]["resolved"]["model version"] == "2.5.0"
    asked_again = {"request": body["request"], "plan": "mine"}
    estimate = web.post("/api/v1/preflight", json=asked_again).json()
    assert estimate["ram"]["source"] == "measured here in one run of this plan and shape"
    assert estimate["time"]["source"] == "history"
    video = web.get(found["job"]["video"])
    assert video.headers["content-type"] == "video/mp4" and len(video.content) > 1000
    files = {"file": ("x.mp4", video.content, "video/mp4")}
    told = web.post("/api/v1/media/settings", files=files)
    assert told.status_code == 200, told.text
    assert told.json()["request"]["family"] == "ltx" and told.json()["request"]["image"] == media.id
