"""Bad input through the real command line: one sentence, the promised status, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

import launch
from app import preflight, presets
from runtime.messages import Reference
from tests.checkpoint_files import edited, marker, tiny
from tests.denoiser_parts import demo_plan

ROOT = Path(__file__).parents[2]


def generate(*options: str | Path, plan: str | Path = "cpu") -> subprocess.CompletedProcess[str]:
    """`launch.py generate` with the demo request."""
    command = [sys.executable, "launch.py", "generate", "--request", "demo", "--plan", str(plan)]
    return subprocess.run(
        [*command, *map(str, options)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def refused(done: subprocess.CompletedProcess[str], *words: str, status: int = 2) -> None:
    """The command ended with this status and one sentence that holds the words."""
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert last.startswith("launch.py generate: ")
    assert all(word in last for word in words), last


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.new("RGB", (64, 64), (90, 20, 20)).save(path)
    return path


def video(path: Path, frames: int, *, rate: int = 24) -> Path:
    """A silent video of plain frames."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=rate)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for n in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), n, np.uint8), format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--width", "100"), ("multiples of 32, got 100x64", "nearest is 96x64")),
        (("--height", "8"), ("multiples of 32", "got 96x8")),
        (("--width", "0"), ("32 to 4096, got 0x64",)),
        (("--frames", "30"), ("frames must be 17k+5", "got 30; the next is 39")),
        (("--frames", "0"), ("got 0; the next is 5",)),
        (("--steps", "0"), ("steps must be 1 to 1000, got 0",)),
        (("--seed", "-1"), ("seed must be 0 to 2^64-1, got -1",)),
        (("--ref-image", "nowhere.png"), ("nowhere.png does not exist",)),
        (("--ref-image", "https://example.org/a.png"), ("does not exist",)),
        (("--ref-image", "presets"), ("presets is not an ordinary file",)),
        (("--ref-image", "~nosuchuser/a.png"), ("~nosuchuser/a.png leads nowhere",)),
        (("--out", ""), ("--out must be a folder, got ''",)),
        (("--out", "/dev/null/run"), ("not a directory: /dev/null/run",)),
        (("--out", "~nosuchuser/run"), ("~nosuchuser/run leads nowhere",)),
        (("--request", "~nosuchuser/r.toml"), ("~nosuchuser/r.toml leads nowhere",)),
    ],
)
def test_a_wrong_value_is_refused_before_anything_loads(
    options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = generate(*options)
    refused(done, *words)
    assert "load" not in done.stderr


def test_a_layout_for_a_negative_side_is_refused_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(presets.dump_plan(demo_plan(layout="CFG2", threads=1)))
    done = generate(plan=tmp_path / "plan.toml")
    refused(done, "layout CFG2 gives half of its ranks the negative side", "choose a layout")
    assert "load" not in done.stderr


def test_a_layout_that_cannot_cut_the_heads_is_refused_before_a_rank_is_started(
    tmp_path: Path,
) -> None:
    (tmp_path / "plan.toml").write_text(presets.dump_plan(demo_plan(layout="U6", threads=1)))
    done = generate(plan=tmp_path / "plan.toml")
    refused(done, "layout U6 shares attention among 6 ranks, and the model has 4 heads")
    assert "load" not in done.stderr


def test_ten_images_are_one_too_many(image: Path) -> None:
    done = generate(*["--ref-image", image] * 10)
    refused(done, "at most 9 image references, got 10; remove 1")


def test_a_text_named_png_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.png"
    path.write_text("remember the milk")
    refused(generate("--ref-image", path), str(path))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.png"
    path.touch()
    refused(generate("--ref-image", path), "empty.png is empty")


def test_a_picture_given_as_video_is_refused(image: Path) -> None:
    refused(
        generate("--ref-video", image), "is an image, not a video; give it as a reference image"
    )


def test_an_animated_gif_can_be_a_video_but_a_still_one_cannot(tmp_path: Path) -> None:
    shades = [Image.new("RGB", (64, 64), (n * 20, 0, 0)) for n in range(8)]
    shades[0].save(tmp_path / "a.gif", save_all=True, append_images=shades[1:], duration=80)
    shades[0].save(tmp_path / "still.gif")
    info = preflight.check_reference(Reference(kind="video", path=tmp_path / "a.gif"))
    assert info.frames == 8
    preflight.check_reference(Reference(kind="image", path=tmp_path / "a.gif"))
    with pytest.raises(ValueError, match=r"still\.gif is an image, not a video"):
        preflight.check_reference(Reference(kind="video", path=tmp_path / "still.gif"))


def test_a_sound_of_one_sample_is_refused_by_name(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "click.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\0")
    done = generate("--ref-audio", tmp_path / "click.wav", "--out", tmp_path / "run")
    refused(done, "click.wav: a sound must last at least 25 ms, got 1 samples at 8000 Hz")


def test_a_muted_video_with_a_soundtrack_is_refused(tmp_path: Path) -> None:
    clip = video(tmp_path / "a.mp4", 24)
    done = generate("--ref-video", clip, "--soundtrack", clip, "--mute")
    refused(done, "a.mp4 is muted and has a soundtrack; leave out one of them")


def test_a_silent_video_given_as_sound_is_refused(tmp_path: Path) -> None:
    path = video(tmp_path / "silent.mp4", 24)
    refused(generate("--ref-audio", path), "silent.mp4 holds no sound; give an audio file")


@pytest.mark.parametrize(("frames", "rate"), [(3, 24), (4, 24), (8, 60)])
def test_a_reference_video_of_too_few_frames_is_refused(
    tmp_path: Path, frames: int, rate: int
) -> None:
    path = video(tmp_path / "short.mp4", frames, rate=rate)
    refused(generate("--ref-video", path), "a reference video needs at least 5 frames at 24 fps")


def test_an_unknown_plan_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('turbo = true\n[models]\ndit = "a"\n')
    refused(generate(plan=path), "unknown key 'turbo' in mine.toml; allowed are name, family")


def test_an_unknown_plan_lists_the_known_ones() -> None:
    refused(generate(plan="gpu"), "no preset 'gpu' in presets/plans; there are cpu")


def test_a_plan_without_its_checkpoints_says_which_file_is_missing() -> None:
    done = generate(plan="h200x1_sdpa")
    refused(done, "minimax_h3_ref2va_pruned_bf16.safetensors, which is not there; put the file")


def test_a_plan_that_names_a_folder_as_a_checkpoint_says_so(tmp_path: Path) -> None:
    plan = presets.load_plan(presets.find("plans", "cpu"))
    folder = replace(plan, models=replace(plan.models, dit=tmp_path))
    with pytest.raises(ValueError, match=f"{tmp_path}, which is not an ordinary file; put the"):
        preflight.check_models(folder)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention", "warp", ("attention", "sdpa", "'warp'")),
        ("nvfp4", "magic", ("nvfp4", "'magic'")),
        ("device", "cuda", ("device cuda",)),
        ("threads", -1, ("plan field threads must be 0 (torch's choice) to 4096, got -1",)),
    ],
)
def test_a_plan_that_cannot_run_here_is_refused_with_the_reason(
    tmp_path: Path, key: str, value: str | int, words: tuple[str, ...]
) -> None:
    text = presets.dump_plan(presets.load_plan(presets.find("plans", "cpu")))
    lines = [
        f"{key} = {json.dumps(value)}" if x.startswith(f"{key} = ") else x
        for x in text.splitlines()
    ]
    (tmp_path / "p.toml").write_text("\n".join(lines))
    refused(generate(plan=tmp_path / "p.toml"), *words)


def plan_with(tmp_path: Path, dit: Path) -> Path:
    """The demo plan with another denoiser."""
    demo = (presets.DEMO / "h3_tiny_pruned_bf16.safetensors").resolve()
    text = presets.dump_plan(presets.load_plan(presets.find("plans", "cpu")))
    assert str(demo) in text
    (tmp_path / "p.toml").write_text(text.replace(str(demo), str(dit)))
    return tmp_path / "p.toml"


def test_a_truncated_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    whole = presets.DEMO / "h3_tiny_pruned_bf16.safetensors"
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole.read_bytes()[:-1000])
    refused(generate(plan=plan_with(tmp_path, cut)), "cut.safetensors")


@pytest.mark.parametrize("format", ["convrot_w4a4", "mxfp8", "nf5"])
def test_an_unknown_marker_is_refused_by_format_and_layer(tmp_path: Path, format: str) -> None:
    layer = "blocks.1.attn.qkv_proj"

    def mark(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{layer}.comfy_quant"] = marker(format=format)

    dit = edited(tiny(tmp_path, "dit", "pruned_nvfp4"), mark)
    refused(generate(plan=plan_with(tmp_path, dit)), format, layer)


def test_a_tensor_of_a_wrong_size_is_refused_by_name_and_shapes(tmp_path: Path) -> None:
    name = "blocks.2.mlp.fc2.weight"

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    dit = edited(tiny(tmp_path, "dit", "pruned_bf16"), shrink)
    refused(generate(plan=plan_with(tmp_path, dit)), name, "[127, 384]", "[128, 384]")


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "request.toml").write_text("prompt = 'mine'")
    refused(generate("--out", tmp_path), "already holds a run; give another folder")
    assert (tmp_path / "request.toml").read_text() == "prompt = 'mine'"


def test_an_empty_prompt_is_allowed(tmp_path: Path) -> None:
    done = generate("--prompt", "", "--steps", "1", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["state"] == "done"


def test_references_of_every_kind_become_a_video(tmp_path: Path, image: Path) -> None:
    sound = tmp_path / "bell.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 22050, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(0).integers(-9, 9, 22050, np.int16).tobytes())
    clip = video(tmp_path / "clip.mp4", 30, rate=30)
    references = ["--ref-video", clip, "--soundtrack", sound, "--ref-image", image]
    done = generate(*references, "--ref-audio", sound, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    with av.open(last["video"]) as file:
        assert [s.type for s in file.streams] == ["video", "audio"]
        assert file.streams.video[0].frames == 22
    assert last["seconds"]["reference encode"] > 0
    kinds = [r["kind"] for r in json.loads(Path(last["run"]).read_text())["request"]["references"]]
    assert kinds == ["video", "image", "audio"]


def started(*options: str | Path) -> subprocess.Popen[str]:
    """`launch.py generate` with the demo request in a process group of its own, running."""
    command = [sys.executable, "launch.py", "generate", "--request", "demo", "--plan", "cpu"]
    return subprocess.Popen(
        [*command, *map(str, options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell that runs the tests in the background hands down an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    """Reads stderr up to a line that begins so."""
    assert process.stderr is not None
    assert any(line.startswith(beginning) for line in process.stderr)


def to_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """As a terminal does for Ctrl-C and systemd for a stop: the rank gets it too."""
    os.killpg(process.pid, number)


def to_console(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """As `kill PID` does."""
    process.send_signal(number)


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
RECEIVERS = pytest.mark.parametrize("send", [to_group, to_console])


@SIGNALS
@RECEIVERS
def test_ctrl_c_or_a_term_at_step_2_cancels_cleanly(
    tmp_path: Path, number: signal.Signals, send: Callable[..., None]
) -> None:
    with started("--steps", "90", "--out", tmp_path / "run") as process:
        wait_for(process, "denoise 2/")
        send(process, number)
        assert process.stderr is not None and process.stdout is not None
        rest, out = process.stderr.read(), process.stdout.read()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "launch.py generate: cancelled during denoise, step" in rest
    assert json.loads(out.splitlines()[-1])["state"] == "cancelled"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"request.toml", "plan.toml", "events.jsonl", "run.json"}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "cancelled"


def test_ctrl_c_while_the_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert launch.main(["generate", "--plan", "cpu"]) == 130
    assert capsys.readouterr().err == "launch.py generate: stopped\n"


@SIGNALS
@RECEIVERS
def test_ctrl_c_or_a_term_while_loading_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals, send: Callable[..., None]
) -> None:
    with started("--out", tmp_path / "run") as process:
        wait_for(process, "load ")
        send(process, number)
        assert process.stderr is not None and process.stdout is not None
        rest = process.stderr.read()  # ends when the last process that holds it has ended
        out = process.stdout.read()
    assert process.returncode == 130 and "Traceback" not in rest
    assert "launch.py generate: cancelled during load" in rest
    assert json.loads(out.splitlines()[-1])["state"] == "cancelled"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "cancelled"


def test_a_rank_killed_while_it_writes_the_video_leaves_no_part(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "download.part").touch()  # somebody else's
    with started("--steps", "1", "--frames", "209", "--out", run) as process:
        wait_for(process, "denoise 1/")
        while not (parts := list(run.glob("result.mp4.*.part"))):
            assert process.poll() is None, "the run ended before its rank could be killed"
            time.sleep(0.002)
        os.kill(int(parts[0].name.split(".")[-2]), signal.SIGKILL)
        assert process.stderr is not None
        rest = process.stderr.read()
    assert process.returncode == 1 and "rank 0 died (exit code -9" in rest, rest
    assert [path.name for path in run.glob("*.part")] == ["download.part"]
    assert not (run / "result.mp4").exists()
    assert json.loads((run / "run.json").read_text())["state"] == "failed"


def test_of_two_runs_into_one_folder_at_once_one_is_refused(tmp_path: Path) -> None:
    options = ("--steps", "1", "--frames", "5", "--out", tmp_path / "run")
    both = [started(*options), started(*options)]
    said = [process.communicate() for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    refusal = said[[process.returncode for process in both].index(2)][1]
    assert "run already holds a run; give another folder" in refusal
    assert (tmp_path / "run" / "result.mp4").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "done"


def test_a_prompt_that_is_not_utf_8_is_refused() -> None:
    refused(generate("--prompt", os.fsdecode(b"a\xffb")), "prompt is not valid UTF-8 text")


def on_small_disk(folder: Path, size: str, script: str) -> subprocess.CompletedProcess[str]:
    """A shell script with a disk of `size` at `folder`, in a mount namespace of its own."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder}"
    space = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mount} && {script}"]
    return subprocess.run(space, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_disk_without_room_is_refused_before_anything_loads(tmp_path: Path) -> None:
    command = f"{sys.executable} launch.py generate --request demo --plan cpu --out {tmp_path}/run"
    done = on_small_disk(tmp_path, "200k", command)
    refused(done, "MiB free and this request needs about 1.0 MiB; free some or choose another")
    assert "load" not in done.stderr


def test_a_disk_that_fills_up_during_the_run_is_a_failure_that_says_so(tmp_path: Path) -> None:
    small, log = tmp_path / "small", tmp_path / "log"
    small.mkdir()
    command = f"{sys.executable} launch.py generate --request demo --plan cpu --out {small}/run"
    fill = f"dd if=/dev/zero of={small}/full bs=1k 2>/dev/null"
    script = (
        f"{command} --steps 90 2>{log} & "
        f"until grep -q 'denoise 1/' {log}; do sleep 0.02; done; {fill}; "
        f"wait $!; status=$?; cat {log} >&2; ls {small}/run; exit $status"
    )
    done = on_small_disk(small, "1800k", script)
    refused(done, "no space left", status=1)
    assert not {"latents.safetensors", "result.mp4"} & set(done.stdout.split())
    assert ".part" not in done.stdout
