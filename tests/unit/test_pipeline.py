"""The whole line on the demo model: prompt to latents, frames and mp4, in this process."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints.demo import write_random
from runtime.checkpoints.header import CheckpointError
from runtime.clock import DENOISE, MUX, TEXT_ENCODE, VIDEO_VAE_DECODE, StageClock
from runtime.h3 import pipeline as module
from runtime.h3.pipeline import Pipeline, load
from runtime.h3.preview import rgb_frames
from runtime.h3.text import TextEncoder
from runtime.kernels.attention import sage1
from runtime.kernels.unavailable import Unavailable
from runtime.media.files import DiskFullError
from runtime.media.mp4 import read_run_metadata
from runtime.messages import Event, Note, Preview, Progress, Ref2VARequest, Reference, Result
from runtime.meter import ATTENTION, COMMUNICATION, GEMM, PARTS
from runtime.nonfinite import NonFinite
from tests.denoiser_parts import FILES, demo_plan

FRAMES, WIDTH, HEIGHT = 5, 64, 32


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return load(demo_plan(text_encoder="resident"), progress=lambda part, done, total: None)


def request(prompt: str = "a calm sea", **fields: object) -> Ref2VARequest:
    small = {"width": WIDTH, "height": HEIGHT, "frames": FRAMES, "steps": 2, "seed": 5}
    return Ref2VARequest(id="r", prompt=prompt, **(small | fields))  # type: ignore[arg-type]


class Ran:
    """One request: its result, events, clock and files."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: Ref2VARequest,
        out: Path,
        *,
        media: bool = False,
        preview: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.clock = StageClock()
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.result: Result = pipeline.generate(
            request,
            out=out,
            media=media,
            preview=preview,
            emit=self.events.append,
            cancelled=lambda: False,
            clock=self.clock,
        )

    @property
    def notes(self) -> list[Note]:
        return [event for event in self.events if isinstance(event, Note)]

    def latents(self) -> dict[str, Tensor]:
        return _tensors(self.out / "latents.safetensors")


def _tensors(path: Path) -> dict[str, Tensor]:
    return load_file(str(path))


class Counted:
    """Counts the calls of a pipeline's encoders."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text = self.frames = 0
        text, frames = pipeline._text_encoder, pipeline.video_vae.encode

        def count_text(check: Callable[[], None]) -> TextEncoder:
            self.text += 1
            return text(check)

        def count_frames(*args: object, **options: object) -> Tensor:
            self.frames += 1
            return frames(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(pipeline, "_text_encoder", count_text)
        monkeypatch.setattr(pipeline.video_vae, "encode", count_frames)


@pytest.fixture
def picture(tmp_path: Path) -> Reference:
    path = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return Reference(kind="image", path=path)


def test_without_media_the_frames_the_sound_and_the_latents_are_written(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    ran = Ran(pipeline, request(), tmp_path / "run")
    assert ran.result.video is None
    assert ran.result.latents == ran.out / "latents.safetensors"
    latents = ran.latents()
    assert latents["video"].shape == (1, 24, 2, 2, 4) and latents["audio"].shape == (1, 32, 2, 8)
    frames = sorted((ran.out / "frames").glob("*.npy"))
    assert len(frames) == FRAMES
    frame = np.load(frames[0])
    assert frame.shape == (HEIGHT, WIDTH, 3) and frame.dtype == np.float32
    assert frame.min() >= 0 and frame.max() <= 1
    assert _tensors(ran.out / "audio.safetensors")["wave"].shape == (1, 2, 8 * 800)


def test_with_media_an_mp4_is_written(pipeline: Pipeline, tmp_path: Path) -> None:
    ran = Ran(pipeline, request(), tmp_path / "run", media=True)
    assert ran.result.video == tmp_path / "run" / "result.mp4"
    assert ran.result.video.read_bytes()[4:8] == b"ftyp"
    assert not (ran.out / "frames").exists()


def test_the_latents_file_says_what_was_asked(pipeline: Pipeline, tmp_path: Path) -> None:
    ran = Ran(pipeline, request("a red kite"), tmp_path / "run")
    with safe_open(str(ran.result.latents), framework="pt") as file:
        record = json.loads(file.metadata()["h3_request"])
    assert record["prompt"] == "a red kite" and record["seed"] == 5


def test_what_was_changed_in_a_reference_is_noted_and_stands_in_the_mp4(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    Image.new("RGB", (960, 544)).save(tmp_path / "big.png")
    references = (Reference(kind="image", path=tmp_path / "big.png"),)
    ran = Ran(pipeline, request(references=references), tmp_path / "run", media=True)
    texts = [note.text for note in ran.notes]
    assert "big.png: 960x544 -> 64x32 pixels" in texts
    record = read_run_metadata(tmp_path / "run" / "result.mp4")
    assert "big.png: 960x544 -> 64x32 pixels" in record["notes"]
    assert record["request"]["prompt"] == "a calm sea" and record["plan"]["name"] == "test"


def test_one_seed_gives_one_result_and_another_seed_another(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    first = Ran(pipeline, request(), tmp_path / "1").latents()
    again = Ran(pipeline, request(), tmp_path / "2").latents()
    other = Ran(pipeline, request(seed=6), tmp_path / "3").latents()
    for name in ("video", "audio"):
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_a_request_made_twice_is_encoded_once(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Reference
) -> None:
    counted = Counted(pipeline, monkeypatch)
    asked = request("a request made twice", references=(picture,))
    first = Ran(pipeline, asked, tmp_path / "1")
    assert (counted.text, counted.frames) == (1, 1)
    again = Ran(pipeline, asked, tmp_path / "2")
    assert (counted.text, counted.frames) == (1, 1)
    assert torch.equal(first.latents()["video"], again.latents()["video"])
    Ran(pipeline, replace(asked, prompt="another prompt"), tmp_path / "3")
    assert (counted.text, counted.frames) == (2, 1)


def test_guidance_encodes_the_negative_side_too(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(pipeline, monkeypatch)
    guided = Ran(pipeline, request("guided", cfg=3.0, negative_prompt="blur"), tmp_path / "1")
    assert counted.text == 2
    plain = Ran(pipeline, request("guided"), tmp_path / "2")
    assert counted.text == 2
    assert not torch.equal(guided.latents()["video"], plain.latents()["video"])


def test_a_reference_changes_the_result(
    pipeline: Pipeline, tmp_path: Path, picture: Reference
) -> None:
    plain = Ran(pipeline, request(), tmp_path / "1").latents()
    referred = Ran(pipeline, request(references=(picture,)), tmp_path / "2").latents()
    assert not torch.equal(plain["video"], referred["video"])


@pytest.mark.parametrize(
    ("mode", "said", "warned"),
    [
        ("fl2va", "is known as FL2VA, but the request has references", True),
        ("unknown", "mode .* unknown", False),
    ],
)
def test_references_on_a_file_of_another_mode_are_warned_of_and_of_none_noted(
    pipeline: Pipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    picture: Reference,
    mode: str,
    said: str,
    warned: bool,
) -> None:
    monkeypatch.setattr(pipeline, "mode", mode)
    ran = Ran(pipeline, request(references=(picture,)), tmp_path / "1")
    (note,) = [note for note in ran.notes if re.search(said, note.text)]
    assert FILES.dit.name in note.text
    assert note.warning is warned
    plain = Ran(pipeline, request(), tmp_path / "2")
    assert not any(note.warning for note in plain.notes)


def test_a_ref2va_file_is_used_with_references_without_a_warning(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: Reference
) -> None:
    monkeypatch.setattr(pipeline, "mode", "ref2va")
    ran = Ran(pipeline, request(references=(picture,)), tmp_path / "1")
    assert not any(note.warning for note in ran.notes)


def test_stages_progress_and_memory_are_reported(pipeline: Pipeline, tmp_path: Path) -> None:
    ran = Ran(pipeline, request("stages", steps=3), tmp_path / "run")
    times = ran.clock.times()
    assert [time.step for time in times if time.stage == DENOISE] == [0, 1, 2]
    assert {TEXT_ENCODE, VIDEO_VAE_DECODE, MUX} <= {time.stage for time in times}
    done = [e.done for e in ran.events if isinstance(e, Progress) and e.stage == DENOISE]
    assert done == [0, 1, 2, 3]
    begun = [e.stage for e in ran.events if isinstance(e, Progress)]
    assert begun.index(TEXT_ENCODE) < begun.index(DENOISE)  # a long encode is not called "start"
    assert any("packed rows" in note.text for note in ran.notes)
    assert ran.result.peak_memory_bytes > 50 << 20


def test_the_parts_of_every_step_are_reported_and_add_up(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    times = Ran(pipeline, request("parts", steps=3), tmp_path / "run").clock.times()
    for step in range(3):
        seconds = {time.stage: time.seconds for time in times if time.step == step}
        assert set(seconds) == {DENOISE, *PARTS}
        assert seconds[ATTENTION] > 0 and seconds[GEMM] > 0 and seconds[COMMUNICATION] == 0
        assert sum(seconds[part] for part in PARTS) == pytest.approx(seconds[DENOISE])


def test_measuring_and_previews_do_not_change_the_latents(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    asked = request("the same bits", steps=3, cfg=2.0)
    silent = load(
        demo_plan(text_encoder="resident", kernel_times=False),
        progress=lambda part, done, total: None,
    )
    plain = Ran(silent, asked, tmp_path / "1")
    shown = Ran(pipeline, asked, tmp_path / "2", preview=True)
    assert not {time.stage for time in plain.clock.times()} & set(PARTS)
    for name, latent in plain.latents().items():
        assert torch.equal(latent, shown.latents()[name])


def test_each_step_is_shown_and_nothing_is_left_half_written(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    ran = Ran(pipeline, request("shown", steps=3), tmp_path / "run", preview=True)
    shown = [event for event in ran.events if isinstance(event, Preview)]
    path = ran.out / "preview.webp"
    assert [(event.step, event.path) for event in shown] == [(0, path), (1, path), (2, path)]
    with Image.open(path) as animation:
        assert animation.n_frames == 2 and animation.size == (WIDTH // 16, HEIGHT // 16)
        last = np.asarray(animation.convert("RGB"))
    # the last step's prediction is the clean latent: sigma ends at 0
    assert np.array_equal(last, rgb_frames(ran.latents()["video"])[0])
    assert not list(ran.out.glob("*.part"))
    assert not (Ran(pipeline, request(), tmp_path / "2").out / "preview.webp").exists()


def test_rows_that_the_attention_refuses_are_refused_before_anything_is_encoded(
    pipeline: Pipeline, tmp_path: Path, picture: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(pipeline, monkeypatch)
    monkeypatch.setattr(module, "attention_backend", lambda name: sage1.BACKEND)
    with pytest.raises(Unavailable, match="rows are no multiple of 64"):
        Ran(pipeline, request("never encoded", references=(picture,)), tmp_path / "run")
    assert (counted.text, counted.frames) == (0, 0)


def test_a_cancelled_request_stops_between_steps(pipeline: Pipeline, tmp_path: Path) -> None:
    steps: list[int] = []

    def emit(event: Event) -> None:
        if isinstance(event, Progress) and event.stage == DENOISE:
            steps.append(event.done)

    with pytest.raises(Cancelled):
        pipeline.generate(
            request("stopped", steps=6),
            out=tmp_path,
            media=False,
            preview=False,
            emit=emit,
            cancelled=lambda: bool(steps) and steps[-1] >= 2,
            clock=StageClock(),
        )
    assert steps == [0, 1, 2]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["stream", "layers"])
def test_a_cancelled_request_stops_while_it_streams_the_text_encoder(
    way: str, tmp_path: Path
) -> None:
    parts: list[str] = []
    streamed = load(
        demo_plan(text_encoder=way), progress=lambda part, done, total: parts.append(part)
    )
    parts.clear()
    with pytest.raises(Cancelled):
        streamed.generate(
            request("stopped early"),
            out=tmp_path,
            media=False,
            preview=False,
            emit=lambda event: None,
            cancelled=lambda: len(parts) == 3,
            clock=StageClock(),
        )
    assert parts == ["load text encoder"] * 3


@pytest.mark.parametrize("media", [True, False])
def test_latents_stay_when_the_decode_fails(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, media: bool
) -> None:
    def broken(*args: object, **options: object) -> Tensor:
        raise NonFinite("video VAE decode", "raw pixels")

    monkeypatch.setattr(pipeline.video_vae, "decode_stream", broken)
    with pytest.raises(NonFinite):
        Ran(pipeline, request(), tmp_path, media=media)
    assert _tensors(tmp_path / "latents.safetensors")["video"].shape == (1, 24, 2, 2, 4)
    assert not (tmp_path / "result.mp4").exists()


def test_latents_that_cannot_be_written_fail_the_request(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *rest: object) -> None:
        raise DiskFullError(path)

    monkeypatch.setattr(module, "write_safetensors_atomic", full)
    with pytest.raises(DiskFullError, match=r"latents\.safetensors"):
        Ran(pipeline, request(), tmp_path, media=True)


def test_latents_decode_to_the_same_mp4_as_the_request(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = Ran(pipeline, request(), tmp_path / "run")
    frames = np.stack([np.load(p) for p in sorted((ran.out / "frames").glob("*.npy"))])
    chunks: list[Tensor] = []
    stream = pipeline.video_vae.decode_stream

    def spy(*args: object, **options: object) -> object:
        for chunk in stream(*args, **options):  # type: ignore[arg-type]
            chunks.append(chunk.clone())
            yield chunk

    monkeypatch.setattr(pipeline.video_vae, "decode_stream", spy)
    result = decode(pipeline, ran.out / "latents.safetensors", tmp_path / "again.mp4")
    assert result.video == tmp_path / "again.mp4" and result.video.stat().st_size > 0
    assert np.array_equal(torch.cat(chunks).numpy(), (frames * 255 + 0.5).astype(np.uint8))
    record = read_run_metadata(tmp_path / "again.mp4")
    assert record["request"]["prompt"] == "a calm sea" and record["request"]["seed"] == 5
    assert record["latents"] == str(ran.out / "latents.safetensors")
    assert record["resolved"] == pipeline.resolved


def decode(pipeline: Pipeline, latents: Path, out: Path) -> Result:
    return pipeline.decode(
        "d",
        latents,
        out=out,
        emit=lambda event: None,
        cancelled=lambda: False,
        clock=StageClock(),
    )


def test_latents_of_another_program_decode_without_a_request(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    tensors = {"video": torch.zeros(1, 24, 2, 2, 4), "audio": torch.zeros(1, 32, 2, 8)}
    save_file(tensors, str(tmp_path / "x.safetensors"))
    decode(pipeline, tmp_path / "x.safetensors", tmp_path / "x.mp4")
    assert read_run_metadata(tmp_path / "x.mp4")["request"] is None


def test_a_request_that_is_not_json_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    tensors = {"video": torch.zeros(1, 24, 2, 2, 4), "audio": torch.zeros(1, 32, 2, 8)}
    save_file(tensors, str(tmp_path / "x.safetensors"), {"h3_request": "{half"})
    with pytest.raises(ValueError, match=r"x\.safetensors has a h3_request that is not JSON"):
        decode(pipeline, tmp_path / "x.safetensors", tmp_path / "x.mp4")
    assert not (tmp_path / "x.mp4").exists()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"video": torch.zeros(1, 24, 2, 2, 4)}, "holds no tensor audio"),
        (
            {"video": torch.zeros(1, 16, 2, 2, 4), "audio": torch.zeros(1, 32, 2, 8)},
            r"holds 'video' \[1, 16, 2, 2, 4\] .* must be \[1,24,T,h,w\]",
        ),
        (
            {"video": torch.zeros(1, 24, 2, 2, 4), "audio": torch.zeros(1, 32, 2, 0)},
            r"'audio' \[1, 32, 2, 0\]",
        ),
    ],
)
def test_a_wrong_latents_file_is_refused_in_one_sentence(
    pipeline: Pipeline, tmp_path: Path, tensors: dict[str, Tensor], said: str
) -> None:
    save_file(tensors, str(tmp_path / "x.safetensors"))
    with pytest.raises(ValueError, match=said):
        decode(pipeline, tmp_path / "x.safetensors", tmp_path / "x.mp4")


def test_a_full_checkpoint_runs_and_a_streamed_text_encoder_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dit = tmp_path / "full.safetensors"
    write_random(dit, "dit", size="tiny", format="full_bf16")
    made: list[weakref.ref[TextEncoder]] = []

    class Watched(TextEncoder):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            made.append(weakref.ref(self))

    monkeypatch.setattr(module, "encoder_of", lambda plan: Watched)
    plan = demo_plan(text_encoder="stream", models=replace(FILES, dit=dit))
    pipeline = load(plan, progress=lambda part, done, total: None)
    assert not made, "the encoder is loaded only when it is asked for"
    ran = Ran(pipeline, request(), tmp_path / "run")
    assert torch.isfinite(ran.latents()["video"]).all()
    gc.collect()
    assert len(made) == 1 and made[0]() is None


@pytest.mark.parametrize("way", ["stream", "layers"])
def test_a_streamed_and_a_resident_text_encoder_give_the_same_latents(
    way: str, pipeline: Pipeline, tmp_path: Path, picture: Reference
) -> None:
    asked = request("the same either way", references=(picture,), cfg=3.0, negative_prompt="blur")
    streamed = load(demo_plan(text_encoder=way), progress=lambda part, done, total: None)
    first = Ran(streamed, asked, tmp_path / "1").latents()
    other = Ran(pipeline, asked, tmp_path / "2").latents()
    assert all(torch.equal(first[name], other[name]) for name in ("video", "audio"))


def test_loading_reports_every_part(tmp_path: Path) -> None:
    seen: list[str] = []
    plan = demo_plan(text_encoder="resident")
    loaded = load(plan, progress=lambda part, done, total: seen.append(part))
    assert list(dict.fromkeys(seen)) == [
        "load denoiser",
        "load video VAE",
        "load audio VAE",
        "load text encoder",
    ]
    assert loaded.load_seconds > 0 and loaded.load_gib_per_s > 0
    assert loaded.resolved["device"] == "cpu" and "SDPA" in loaded.resolved["attention"]


def test_the_routes_of_the_formats_in_the_file_are_in_the_resolved_plan(tmp_path: Path) -> None:
    dit = tmp_path / "nvfp4.safetensors"
    write_random(dit, "dit", size="tiny", format="pruned_nvfp4")
    plan = demo_plan(nvfp4="nvfp4_native", models=replace(FILES, dit=dit))
    resolved = load(plan, progress=lambda part, done, total: None).resolved
    assert resolved["linear nvfp4_native"] == "CPU reference, exact products"
    assert not any("fp8" in name or "int8" in name for name in resolved)


@pytest.mark.parametrize("part", ["dit", "text_encoder", "video_vae", "audio_vae"])
def test_a_weight_that_is_not_finite_is_refused_with_its_file_and_name(
    tmp_path: Path, part: str
) -> None:
    whole: Path = getattr(FILES, part)
    with safe_open(str(whole), framework="pt") as file:
        metadata = file.metadata()
    tensors = _tensors(whole)
    name = max(n for n, t in tensors.items() if t.is_floating_point() and t.numel() > 1)
    tensors[name].view(-1)[0] = float("nan")
    bad = tmp_path / whole.name
    save_file(tensors, str(bad), metadata)
    plan = demo_plan(text_encoder="resident", models=replace(FILES, **{part: bad}))
    with pytest.raises(CheckpointError, match="holds NaN or infinity as") as error:
        load(plan, progress=lambda part, done, total: None)
    assert str(error.value).startswith(f"{bad}: ")
    assert name.rsplit(".", 2)[-2] in str(error.value)


def test_a_file_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = _tensors(FILES.dit)
    tensors["blocks.0.attn.q_norm.weight"] = torch.ones(1, 2)
    save_file(tensors, str(tmp_path / "dit.safetensors"))
    plan = demo_plan(models=replace(FILES, dit=tmp_path / "dit.safetensors"))
    with pytest.raises(CheckpointError, match=r"q_norm\.weight has shape .* must be a vector") as e:
        load(plan, progress=lambda part, done, total: None)
    assert str(e.value).startswith(str(tmp_path / "dit.safetensors"))


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        load(demo_plan(device="cuda"), progress=lambda part, done, total: None)


def test_an_attention_that_the_vae_cannot_use_is_refused_before_anything_is_loaded() -> None:
    seen: list[str] = []
    plan = demo_plan(vae_attention="sage2", video_vae_dtype="fp32", dtype="bf16")
    with pytest.raises(Unavailable, match="bfloat16 and float16 only"):
        load(plan, progress=lambda part, done, total: seen.append(part))
    assert not seen
