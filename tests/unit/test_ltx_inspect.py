"""`launch.py inspect` on LTX files, and `make-demo --family ltx`."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from app.models import look
from launch import main
from runtime.checkpoints.classify import classify
from runtime.checkpoints.header import read_header
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.demo import random_denoiser, write_denoiser
from runtime.ltx.load import load_connectors, load_denoiser, open_denoiser
from runtime.ltx.published import FORMATS, published
from runtime.messages import ModelFiles, Plan
from tests.checkpoint_files import read_all, tiny
from tests.ltx_files import write_bf16, write_nvfp4

CPU = torch.device("cpu")


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["inspect", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], str]:
    status, out, err = inspect(capsys, *words, "--json")
    return status, json.loads(out), err


def test_it_says_family_release_licence_build_and_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def name(tensors: object, metadata: dict[str, str]) -> None:
        metadata["license"] = "Some licence 1.0"

    status, out, _ = inspect(capsys, write_nvfp4(tmp_path / "a.safetensors", name))
    assert status == 0
    for said in (
        "two-stream LTX denoiser · prefix model.diffusion_model.",
        "video 128 · audio 128 · blocks 2 · video heads 4 · audio heads 4 · connector blocks 1",
        "family ltx · release 2.5.0 · text tower gemma4-12b-ltx-v1",
        'licence key: "Some licence 1.0"',
        "markers in the header · keyframes · connectors · 28 layers packed in 1 of 2 blocks",
        "nvfp4 order high_tiled: even column in the high nibble, scales in tiles of 128x4",
    ):
        assert said in out


def test_it_says_what_a_file_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def silent(tensors: object, metadata: dict[str, str]) -> None:
        del metadata["license"], metadata["gemma_source_checkpoint"]

    path = write_bf16(tmp_path / "a.safetensors", silent, keyframes=False, with_connectors=False)
    status, out, _ = inspect(capsys, path)
    assert status == 0
    assert "licence not said: the header has no license key" in out
    assert "text tower not said" in out
    assert "no keyframes tensor (counts as zeros) · no connectors" in out
    assert "nvfp4" not in out


def test_a_long_licence_is_shown_by_its_beginning_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def whole(tensors: object, metadata: dict[str, str]) -> None:
        metadata["license"] = "A licence\nof many words. " * 1000

    _, out, _ = inspect(capsys, write_bf16(tmp_path / "a.safetensors", whole))
    (line,) = (text for text in out.splitlines() if text.startswith("licence"))
    assert line.startswith('licence key: "A licence of many words. A licence')
    assert line.endswith("(25,000 characters)")


@pytest.mark.parametrize("order", ["high_tiled", "low_linear"])
def test_an_unmarked_file_is_a_problem_until_a_copy_tells_its_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", markers="none", order=order)
    status, out, err = inspect(capsys, path)
    assert status == 2
    assert "nvfp4 order not known" in out
    assert "the order of nibbles and scales is not known" in err
    assert err.count("\n") == 1
    copy = write_bf16(tmp_path / "copy.safetensors")
    status, report, _ = as_json(capsys, path, "--against", copy)
    assert (status, report["ltx"]["nvfp4_order"]) == (0, order)
    by_order = {r["order"]: r["correlation"] for r in report["ltx"]["readings"]}
    assert max(by_order, key=by_order.__getitem__) == order
    assert len(by_order) == 4


def test_a_copy_of_other_weights_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", markers="none")
    other = write_bf16(tmp_path / "b.safetensors", seed=1)
    status, _, err = inspect(capsys, path, "--against", other)
    assert status == 2
    assert "no order of nibbles and scales fits the copy" in err


def test_markers_that_the_copy_contradicts_are_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", order="low_linear")
    status, _, err = inspect(capsys, path, "--against", write_bf16(tmp_path / "b.safetensors"))
    assert status == 2
    assert "has markers, which mean high_tiled" in err


def test_a_file_without_config_is_shown_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_bf16(tmp_path / "a.safetensors", lambda tensors, metadata: metadata.pop("config"))
    status, out, err = inspect(capsys, path)
    assert status == 2
    assert "video 128 · audio 128" in out
    assert "the header has no config" in err
    assert err.count("\n") == 1


def test_a_file_that_does_not_fit_its_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(tensors: dict[str, object], metadata: object) -> None:
        del tensors["proj_out.bias"]

    status, _, err = inspect(capsys, write_bf16(tmp_path / "a.safetensors", cut))
    assert status == 2
    assert "1 tensors missing: proj_out.bias" in err


def test_a_copy_belongs_to_ltx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny(tmp_path, "dit", "pruned_bf16")
    status, _, err = inspect(capsys, path, "--against", path)
    assert status == 2
    assert "--against belongs to an LTX denoiser" in err


@pytest.mark.parametrize("format", FORMATS)
def test_a_gpu_holds_what_the_report_says(tmp_path: Path, format: str) -> None:
    path = tmp_path / "a.safetensors"
    write_denoiser(path, size="tiny", format=format)
    report = classify(read_header(path))
    (part,) = report.parts
    assert "unknown" not in {tensor.role for tensor in part.tensors}
    assert report.header_bytes + sum(tensor.bytes for tensor in part.tensors) == report.file_bytes
    checkpoint = open_denoiser(path, "high_tiled")
    attend = load_ltx_attention("sdpa", checkpoint.census.config, CPU, torch.bfloat16)
    options: dict[str, Any] = {"device": CPU, "dtype": torch.bfloat16}
    modules = (
        load_denoiser(checkpoint, attend, **options)[0],
        load_connectors(checkpoint, attend, **options),
    )
    held = [*modules[0].state_dict().values(), *modules[1].state_dict().values()]
    assert report.gpu_bytes == sum(tensor.nbytes for tensor in held)


def test_a_full_size_file_is_read_in_seconds_by_its_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = published("full", "nvfp4_bare")
    path = tmp_path / "full.safetensors"
    with path.open("wb") as file:
        file.write(layout.header())
        file.truncate(file.tell() + layout.payload_bytes)  # a hole: nothing of it is read
    began = time.perf_counter()
    status, report, _ = as_json(capsys, path)
    assert time.perf_counter() - began < 10
    assert (status, report["tensors"], report["ltx"]["official"]) == (0, 7876, True)
    assert (report["ltx"]["markers"], report["ltx"]["nvfp4_order"]) == ("none", "high_tiled")
    (part,) = report["parts"]
    roles = Counter(tensor["role"] for tensor in part["tensors"])
    assert roles["table"] == 290
    assert roles["scale"] == 3 * 1176
    assert roles["connector"] == 2 * 129


# preflight ---------------------------------------------------------------------------------------


def looked_at(path: Path, order: str = "auto") -> str:
    """What preflight says of the denoiser of a plan, "" when it can run."""
    files = ModelFiles(dit=path, text_encoder=path, video_vae=path, audio_vae=path)
    plan = Plan(name="p", family="ltx", models=files, ltx_nvfp4_order=order, video_vae_dtype="bf16")
    return next(found.problem for found in look(plan).files if found.role == "dit")


def test_doctor_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_nvfp4(tmp_path / "dit.safetensors", markers="none")
    folders = "".join(
        f'{role} = "{role}"\n'
        for role in ("text_encoder", "video_vae", "audio_vae", "vocoder", "upsampler")
    )
    text = (
        'family = "ltx"\ndevice = "cpu"\nvideo_vae_dtype = "fp32"\n[models]\n'
        f'dit = "dit.safetensors"\n{folders}'
    )
    (tmp_path / "plan.toml").write_text(text)
    assert main(["doctor", "--plan", str(tmp_path / "plan.toml")]) == 1
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "denoiser  " in line)
    assert said.startswith("fatal") and "order of nibbles and scales is not known" in said


def test_preflight_refuses_what_the_loader_would(tmp_path: Path) -> None:
    unmarked = write_nvfp4(tmp_path / "a.safetensors", markers="none")
    assert "order of nibbles and scales is not known" in looked_at(unmarked)
    assert looked_at(unmarked, "high_tiled") == ""
    marked = write_nvfp4(tmp_path / "b.safetensors")
    assert looked_at(marked) == ""
    assert "has markers, which mean high_tiled" in looked_at(marked, "low_linear")

    def cut(tensors: dict[str, object], metadata: object) -> None:
        del tensors["proj_out.bias"]

    assert "1 tensors missing: proj_out.bias" in looked_at(
        write_nvfp4(tmp_path / "c.safetensors", cut)
    )
    bare = write_bf16(tmp_path / "d.safetensors", lambda tensors, metadata: metadata.pop("config"))
    assert "the header has no config" in looked_at(bare)
    assert "holds MiniMax H3 DiT" in looked_at(tiny(tmp_path, "dit", "pruned_bf16"))


# make-demo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_make_demo_writes_a_denoiser_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    command = ["make-demo", "--family", "ltx", "--size", "tiny", "--out", str(tmp_path)]
    assert main([*command, "--format", format, "--only", "dit"]) == 0
    path = tmp_path / f"random_tiny_ltx_dit_{format}.safetensors"
    assert str(path) in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
    checkpoint = open_denoiser(path, "high_tiled")
    assert len(checkpoint.layers) == (0 if format == "bf16" else 2 * 28)
    attend = load_ltx_attention("sdpa", checkpoint.census.config, CPU, torch.bfloat16)
    for nvfp4 in ("nvfp4_dequant", "nvfp4_native"):
        load_denoiser(checkpoint, attend, device=CPU, dtype=torch.bfloat16, nvfp4=nvfp4)


def test_weights_in_memory_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_denoiser(path, size="tiny", format="nvfp4", seed=3)
    tensors, _ = read_all(path)
    made = random_denoiser("tiny", "nvfp4", seed=3)
    assert len(made.names()) == len(tensors)
    for name in made.names():
        stored = tensors[f"model.diffusion_model.{name}"]
        assert torch.equal(
            made.tensor(name).reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8)
        ), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "pruned_nvfp4"], "comes as nvfp4, nvfp4_bare, bf16"),
        (["--text-encoder", "bf16"], "--text-encoder belongs to family h3"),
        (["--video-vae", "fp16"], "--video-vae belongs to family h3"),
    ],
)
def test_what_belongs_to_h3_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    command = ["make-demo", "--family", "ltx", "--size", "tiny", "--out", str(tmp_path)]
    assert main([*command, *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_make_demo_writes_a_tiny_set_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    command = ["make-demo", "--family", "ltx", "--size", "tiny", "--out", str(tmp_path)]
    assert main([*command, "--seed", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(str(tmp_path / "random_tiny_ltx_dit_nvfp4.safetensors"))
    parts = {part: Path(folder) for folder, part in (line.split("  ", 1) for line in said[1:])}
    wanted = {"text_encoder", "tokenizer", "video_vae", "audio_vae", "vocoder", "upsampler"}
    assert parts.keys() == wanted
    assert all(any(folder.iterdir()) for folder in parts.values())
    said_by_tower = json.loads((parts["text_encoder"] / "config.json").read_text())["gemma_version"]
    assert said_by_tower == open_denoiser(next(tmp_path.glob("*.safetensors"))).census.gemma_version


def test_only_the_denoiser_can_be_asked_for_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["make-demo", "--family", "ltx", "--size", "tiny", "--out", str(tmp_path)]
    assert main([*command, "--only", "video_vae"]) == 2
    assert "--only of family ltx may be dit, got video_vae" in capsys.readouterr().err
