"""A folder of LTX that lacks a tensor and a damaged tokenizer are refused before any is loaded."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app import doctor, ltx_fit, preflight, presets
from app.children import ROOT, ChildFailed, run_child
from app.console import Console
from launch import main
from runtime.checkpoints.header import RANDOM_WEIGHTS, CheckpointError, read_header
from runtime.ltx import components, fit
from runtime.ltx.folders import UPSAMPLER
from runtime.ltx.tiny_components import ComponentFolders
from runtime.messages import LTXRequest, Plan
from tests.consoles import client, ltx_console
from tests.ltx_plans import counted_children, plan_of, zeros

REQUEST = LTXRequest(id="x", prompt="x", width=64, height=64, frames=9)
SMALL = {"family": "ltx", "prompt": "x", "width": 64, "height": 64, "frames": 9}
TOWER = "Gemma4UnifiedForConditionalGeneration"
Shapes = dict[str, tuple[str, tuple[int, ...]]]


@pytest.fixture
def ltx(tmp_path: Path) -> Plan:
    return plan_of(tmp_path / "models", RANDOM_WEIGHTS)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The roles that a child is asked about; it answers here, where the libraries are loaded."""
    found: list[list[str]] = []

    def answered(module: str, **options: Any) -> str:
        told = json.loads(options["stdin"])
        found.append(list(told))
        return json.dumps({role: fit.problem_of(role, Path(at)) for role, at in told.items()})

    monkeypatch.setattr(ltx_fit, "run_child", answered)
    return found


def reshape(change: Callable[[Shapes], object]) -> Callable[[Path], Path]:
    """Of the tensors of a folder that holds zeros."""

    def changed(folder: Path) -> Path:
        path = folder / "model.safetensors"
        shapes: Shapes = {n: (i.dtype, i.shape) for n, i in read_header(path).tensors.items()}
        change(shapes)
        return zeros(path, shapes)

    return changed


def less(name: str) -> Callable[[Path], Path]:
    return reshape(lambda shapes: shapes.pop(name))


def with_(name: str, *shape: int) -> Callable[[Path], Path]:
    return reshape(lambda shapes: shapes.update({name: ("F32", shape)}))


def config(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> object:
        path = folder / "config.json"
        return path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


LAYER = "model.language_model.layers.1"


@pytest.mark.parametrize(
    ("role", "change", "words"),
    [
        (
            "video_vae",
            less("decoder.conv_out.conv.bias"),
            "video_vae/model.safetensors does not fit AutoencoderKLLTX2Video: "
            "decoder.conv_out.conv.bias is missing",
        ),
        (
            "audio_vae",
            reshape(lambda s: [s.pop(n) for n in list(s) if n.startswith("decoder.mid.")]),
            "fit AutoencoderKLLTX2Audio: decoder.mid.block_1.conv1.conv.weight is missing; deco",
        ),
        ("vocoder", less("vocoder.conv_in.bias"), "vocoder.conv_in.bias is missing"),
        ("vocoder", with_("more", 1), "does not fit LTX2VocoderWithBWE: more is left over"),
        ("upsampler", with_("final_conv.bias", 3), "final_conv.bias is [3], expected [16]"),
        ("upsampler", config(sharpness=2), "config.json has sharpness, which the installed diffu"),
        ("upsampler", config(**{"\ud800": 2}), r"config.json has '\ud800', which the installed"),
        ("upsampler", config(**{"k" * 3000: 2}), "k... (3,000 characters), which the installed"),
        ("upsampler", with_("k" * 3000, 1), "k... (3,013 characters); change"),
        (
            "video_vae",
            config(layers_per_block=3),
            "config.json makes no AutoencoderKLLTX2Video (Ty",
        ),
        (
            "text_encoder",
            less(f"{LAYER}.mlp.up_proj.weight"),
            f"/model.safetensors does not fit {TOWER}: {LAYER}.mlp.up_proj.weight is missing;",
        ),
        ("text_encoder", with_("model.more", 1), f"{TOWER}: model.more is left over; change"),
        (
            "text_encoder",
            with_(f"{LAYER}.mlp.up_proj.weight", 3, 32),
            f"{LAYER}.mlp.up_proj.weight is [3, 32], expected [64, 32]; change",
        ),
        ("text_encoder", config(tie_word_embeddings="no"), "is not understood by transformers: "),
        (
            "text_encoder",
            config(dtype="\ud800"),
            r"is not understood by transformers: module 'torch' has no attribute '\ud800'",
        ),
        (
            "text_encoder",
            config(quantization_config={"quant_method": "fp8"}),
            "cannot be loaded by transformers: Loading an FP8 quantized model requires accelerate",
        ),
    ],
)
def test_a_folder_that_its_class_cannot_be_made_of_is_refused_in_one_sentence(
    ltx: Plan, tmp_path: Path, role: str, change: Callable[[Path], object], words: str
) -> None:
    preflight.check(REQUEST, ltx, tmp_path, media=False)
    change(getattr(ltx.models, role))
    preflight.check_models(ltx)  # its header alone does not show it
    with pytest.raises(ValueError) as refused:
        preflight.check(REQUEST, ltx, tmp_path, media=False)
    told = str(refused.value)
    assert words in told and "\n" not in told and told.endswith("change [models] in plan mine")
    assert str(getattr(ltx.models, role)) in told
    (finding,) = (f for f in doctor._checkpoints(ltx) if f.status == "fatal")
    assert told.startswith(finding.text)


def test_what_a_folder_holds_is_asked_about_once_wherever_it_lies(
    tmp_path: Path, ltx: Plan, asked: list[list[str]]
) -> None:
    preflight.check_loadable(ltx)
    asked.clear()
    other = plan_of(tmp_path / "other")
    less("vocoder.conv_in.weight")(other.models.vocoder)  # type: ignore[arg-type]
    for _ in range(2):
        preflight.check_loadable(ltx)
        with pytest.raises(ValueError, match=r"other/vocoder/model\.safetensors does not fit"):
            preflight.check_loadable(other)
    assert asked == [["vocoder"]]
    less("vocoder.conv_in.weight")(ltx.models.vocoder)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"models/vocoder/model\.safetensors does not fit"):
        preflight.check_loadable(ltx)
    assert asked == [["vocoder"]]


def test_a_child_that_died_is_asked_again(ltx: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def died(module: str, **options: Any) -> str:
        raise ChildFailed("looking into the folders of plan mine took too much time")

    with_("model.more", 7)(ltx.models.text_encoder)
    with monkeypatch.context() as patched:
        patched.setattr(ltx_fit, "run_child", died)
        with pytest.raises(ChildFailed):
            preflight.check_loadable(ltx)
        (finding,) = (f for f in doctor._checkpoints(ltx) if f.status == "fatal")
        assert "took too much time" in finding.text and finding.todo.startswith("try again")
    with pytest.raises(ValueError, match=r"model\.more is left over"):
        preflight.check_loadable(ltx)


def test_a_library_that_is_not_installed_is_the_sentence(
    ltx: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(components.importlib, "import_module", absent)
    told = io.StringIO(json.dumps({"vocoder": str(ltx.models.vocoder)}))
    monkeypatch.setattr(sys, "stdin", told)
    assert fit.main() == 2
    said = capsys.readouterr()
    assert not said.out and "diffusers cannot be imported" in said.err


def test_the_doctor_says_once_what_to_install(ltx: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str, **options: Any) -> str:
        raise ValueError("diffusers cannot be imported; install the extra with pip")

    monkeypatch.setattr(ltx_fit, "run_child", absent)
    with_("model.more", 8)(ltx.models.text_encoder)
    (finding,) = (f for f in doctor._checkpoints(ltx) if f.status == "fatal")
    assert finding.text == "diffusers cannot be imported"
    assert finding.todo == "install the extra with pip"


def test_no_number_of_a_folder_is_read(
    ltx_components: ComponentFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object, **options: object) -> object:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(components, "safe_open", read)
    monkeypatch.setattr("safetensors.safe_open", read)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", read)
    for role in ("text_encoder", "video_vae", "audio_vae", "vocoder", "upsampler"):
        assert fit.problem_of(role, getattr(ltx_components, role)) == ""


def test_the_loader_says_the_same_of_the_same_folder(
    ltx_components: ComponentFolders, tmp_path: Path
) -> None:
    file = "diffusion_pytorch_model.safetensors"
    tensors = load_file(ltx_components.upsampler / file)
    del tensors["final_conv.bias"]
    (tmp_path / "config.json").write_text((ltx_components.upsampler / "config.json").read_text())
    save_file(tensors, tmp_path / file)
    with pytest.raises(CheckpointError) as refused:
        components.load_component(
            tmp_path,
            UPSAMPLER,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    assert str(refused.value) == fit.problem_of("upsampler", tmp_path)


# ---- the files of the tower


def test_a_file_beside_the_towers_own_is_as_little_in_the_way_as_at_the_load(ltx: Plan) -> None:
    zeros(ltx.models.text_encoder / "vision.safetensors", {"vision.embed": ("F32", (2, 2))})
    preflight.check_loadable(ltx)
    with_("vision.more", 1)(ltx.models.text_encoder)
    with pytest.raises(ValueError, match=r": vision\.more is left over; change"):
        preflight.check_loadable(ltx)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "has no model.safetensors and no model.safetensors.index.json, so transformers"),
        ("{", "index.json cannot be read as an index: "),
        ('{"weight_map": {"x": "b.safetensors"}}', "index.json names b.safetensors, which is not"),
        ('{"weight_map": {"x": "a.safetensors"}}', ""),
    ],
)
def test_a_tower_in_files_of_other_names_needs_its_index(
    ltx: Plan, index: str | None, words: str
) -> None:
    folder = ltx.models.text_encoder
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(index)
    if not words:
        preflight.check_loadable(ltx)
        return
    with pytest.raises(ValueError) as refused:
        preflight.check_models(ltx)  # which needs no child for it
    assert words in str(refused.value)


# ---- the tokenizer


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0"', "[]"])
def test_a_damaged_tokenizer_is_refused_whatever_the_prompt(
    ltx: Plan, tmp_path: Path, text: str
) -> None:
    preflight.check(REQUEST, ltx, tmp_path, media=False)
    file = ltx.models.text_encoder / "tokenizer.json"
    file.write_text(text)
    preflight.check_models(ltx)
    with pytest.raises(ValueError) as refused:
        preflight.check(REQUEST, ltx, tmp_path, media=False)
    told = str(refused.value)
    assert told.startswith(f"{file} is not a tokenizer: ") and "\n" not in told
    assert told.endswith("; change [models] in plan mine")
    assert doctor._ltx_tokenizer(ltx).status == "fatal"


def test_a_sound_tokenizer_costs_one_process(ltx: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    started = counted_children(monkeypatch)
    for _ in range(2):
        preflight.check_loadable(ltx)
    assert started == ["runtime.ltx.measure"]


# ---- who asks


@pytest.fixture
def console(tmp_path: Path, ltx: Plan) -> Iterator[Console]:
    with ltx_console(tmp_path / "runs", ltx) as console:
        console.session.pause(True)
        yield console


@pytest.mark.parametrize("damage", ["tensor", "tokenizer"])
def test_preflight_and_queue_say_the_same(console: Console, ltx: Plan, damage: str) -> None:
    web = client(console)
    asked = {"request": SMALL, "plan": "mine"}
    assert web.post("/api/v1/preflight", json=asked).json()["blocked"] == ""
    if damage == "tensor":
        less("vocoder.conv_in.weight")(ltx.models.vocoder)  # type: ignore[arg-type]
    else:
        (ltx.models.text_encoder / "tokenizer.json").write_text("{}")
    blocked = web.post("/api/v1/preflight", json=asked).json()["blocked"]
    words = "vocoder.conv_in.weight is missing" if damage == "tensor" else "is not a tokenizer"
    assert words in blocked
    queued = web.post("/api/v1/jobs", json={"request": SMALL, "plans": ["mine"], "force": True})
    assert (queued.status_code, queued.json()) == (400, {"detail": blocked})


def test_the_child_itself_answers(ltx: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ltx_fit, "run_child", run_child)
    less("final_conv.weight")(ltx.models.upsampler)  # type: ignore[arg-type]
    less("decoder.conv_in.conv.weight")(ltx.models.video_vae)
    found = ltx_fit.problems(ltx)
    assert "final_conv.weight is missing" in found["upsampler"]
    assert "decoder.conv_in.conv.weight is missing" in found["video_vae"]
    assert not found["text_encoder"] and not found["vocoder"]


def test_listing_plans_starts_no_process(console: Console, asked: list[list[str]]) -> None:
    listed = {p["name"]: p for p in client(console).get("/api/v1/plans").json()["plans"]}
    assert listed["mine"]["runs"] and not asked


def test_decode_refuses_before_an_engine_is_started(
    ltx: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(plan: Plan) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("app.cli.decode.Engine", started)
    (tmp_path / "plan.toml").write_text(presets.dump_plan(replace(ltx, name="mine")))
    shapes: Shapes = {"video": ("F32", (1, 16, 2, 2, 2)), "audio": ("F32", (1, 8, 9, 16))}
    zeros(tmp_path / "x.safetensors", shapes, ltx_request=json.dumps({"fps": 24}))
    less("vocoder.conv_in.weight")(ltx.models.vocoder)  # type: ignore[arg-type]
    assert main(["decode", str(tmp_path / "x.safetensors"), "--out", str(tmp_path / "x.mp4")]) == 2
    assert "vocoder.conv_in.weight is missing" in capsys.readouterr().err


def test_the_console_asks_without_torch() -> None:
    code = (
        "import sys, app.ltx_fit; print([n for n in ('torch', 'tokenizers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
