"""`launch.py inspect`: classification, mode, speed, and a sentence for files it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from launch import main
from runtime.checkpoints.classify import classify
from runtime.checkpoints.header import CheckpointError, read_header
from runtime.checkpoints.modes import KNOWN_MODELS, learn, mode_of
from tests.checkpoint_files import edited, marker, read_all, sparse, tiny

ROOT = Path(__file__).resolve().parents[2]


def _inspect(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "launch.py", "inspect", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def _json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["inspect", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("role", "format", "family"),
    [
        ("dit", "full_bf16", "MiniMax H3 DiT"),
        ("dit", "pruned_nvfp4", "MiniMax H3 DiT"),
        ("text_encoder", "nvfp4_awq", "Qwen3-VL text encoder"),
        ("video_vae", "int8_convrot", "H3 video VAE"),
        ("audio_vae", "fp32", "H3 audio VAE"),
    ],
)
def test_every_tensor_has_a_role_and_the_bytes_add_up(
    tmp_path: Path, role: str, format: str, family: str
) -> None:
    report = classify(read_header(tiny(tmp_path, role, format)))
    (part,) = report.parts
    assert (part.family, part.role, part.problem) == (family, role, "")
    assert "unknown" not in {tensor.role for tensor in part.tensors}
    stored = sum(tensor.bytes for tensor in part.tensors)
    assert report.header_bytes + stored == report.file_bytes


def test_dims_grid_and_rank_are_read_from_the_shapes(tmp_path: Path) -> None:
    (part,) = classify(read_header(tiny(tmp_path, "dit", "pruned_nvfp4"))).parts
    assert part.pruned
    assert part.dims == {
        "hidden": 128,
        "blocks": 3,
        "refiner blocks": 2,
        "heads": 4,
        "head dim": 128,
        "ffn": 384,
        "text": 16,
        "video channels": 24,
        "audio channels": 32,
        "grid": 129,
        "rank": 8,
    }


def test_another_table_rank_is_shown_as_such(tmp_path: Path) -> None:
    path = edited(
        tiny(tmp_path, "dit", "pruned_bf16"),
        lambda tensors: tensors.update({"adaln_t_table": torch.zeros(65, 4)}),
    )
    (part,) = classify(read_header(path)).parts
    assert (part.dims["grid"], part.dims["rank"]) == (65, 4)


def test_scales_carry_their_layout_swizzle_and_padding(tmp_path: Path) -> None:
    (part,) = classify(read_header(tiny(tmp_path, "text_encoder", "nvfp4_awq"))).parts
    tensors = {tensor.name: tensor for tensor in part.tensors}
    scale = tensors["model.layers.0.mlp.down_proj.weight_scale"]
    assert (scale.role, scale.quant) == ("scale", "nvfp4")
    assert "128x4 swizzle" in scale.layout
    assert scale.padding == "16x3 of 128x4 used"
    assert tensors["model.layers.0.mlp.down_proj.comfy_quant"].role == "marker"
    assert tensors["model.layers.0.mlp.down_proj.weight"].role == "mlp"


def test_quantised_layers_are_counted_by_format_and_option(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["blocks.0.mlp.fc1.comfy_quant"] = marker(
            format="nvfp4", full_precision_matrix_mult=True
        )
        tensors["blocks.0.mlp.fc2.input_scale"] = torch.tensor(1.0)

    path = edited(tiny(tmp_path, "dit", "pruned_nvfp4"), edit)
    (part,) = classify(read_header(path)).parts
    counts = {group.full_precision: (group.layers, group.input_scale) for group in part.quantised}
    assert counts == {False: (19, 1), True: (1, 0)}


def test_a_gpu_holds_rounded_islands_and_no_markers(tmp_path: Path) -> None:
    (part,) = classify(read_header(tiny(tmp_path, "dit", "pruned_nvfp4"))).parts
    tensors = {tensor.name: tensor for tensor in part.tensors}
    island = tensors["video_patch_proj.weight"]
    assert island.gpu_bytes == island.bytes  # rounded, and fp32 again
    assert tensors["adaln_t_table"].gpu_bytes == tensors["adaln_t_table"].bytes
    packed = tensors["blocks.0.mlp.fc1.weight"]
    assert packed.gpu_bytes == packed.bytes
    assert tensors["blocks.0.mlp.fc1.comfy_quant"].gpu_bytes == 0


def test_a_66_gb_file_is_inspected_in_under_two_seconds(tmp_path: Path) -> None:
    path = sparse(tmp_path, "dit", "full_bf16")
    assert path.stat().st_size > 66_000_000_000
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "launch.py", "inspect", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    assert "full · mode unknown" in done.stdout and "66,280,486,728 bytes" in done.stdout
    assert seconds < 2.0


def test_the_printed_report_is_an_aligned_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sparse(tmp_path, "dit", "pruned_nvfp4")
    assert main(["inspect", str(path), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("11.668 GiB   12,528,636,800 bytes   1,132 tensors")
    assert any(line.split()[:2] == ["nvfp4", "200"] for line in lines)
    rules = [i for i, line in enumerate(lines) if line.startswith("───")]
    assert len(rules) == 4
    for i in rules:
        assert len(lines[i - 1]) <= len(lines[i])
        assert len(lines[i + 1]) <= len(lines[i])
    assert sum("blocks." in line for line in lines) == 50 * (8 + 2 + 4 * 3) + 2 * 8


def test_json_holds_every_tensor_and_the_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    report = _json(path, capsys)
    (part,) = report["parts"]
    tensors, _ = read_all(path)
    assert {tensor["name"] for tensor in part["tensors"]} == set(tensors)
    assert part["by_dtype"]["F8_E4M3"]["tensors"] == 20
    assert part["by_role"]["island"]["tensors"] == 8
    assert report["gpu_bytes"] == sum(tensor["gpu_bytes"] for tensor in part["tensors"])


@pytest.mark.parametrize("format", ["pruned_nvfp4", "full_bf16"])
def test_a_learnt_file_is_recognised_in_every_precision(tmp_path: Path, format: str) -> None:
    known = tmp_path / "known.toml"
    header = read_header(tiny(tmp_path, "dit", format, seed=1))
    assert mode_of(header, known) == "unknown"
    assert learn(header, "ref2va", known)
    assert mode_of(header, known) == "ref2va"
    twin = {"pruned_nvfp4": "pruned_int8", "full_bf16": "full_fp8"}[format]
    assert mode_of(read_header(tiny(tmp_path, "dit", twin, seed=1)), known) == "ref2va"
    assert mode_of(read_header(tiny(tmp_path, "dit", format, seed=2)), known) == "unknown"


def test_learning_twice_adds_one_entry_and_keeps_the_comments(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(KNOWN_MODELS.read_text())
    header = read_header(tiny(tmp_path, "dit", "pruned_nvfp4"))
    assert learn(header, "fl2va", known)
    assert not learn(header, "fl2va", known)
    text = known.read_text()
    assert text.startswith(KNOWN_MODELS.read_text())
    assert [entry["mode"] for entry in tomllib.loads(text)["model"]] == ["fl2va"]
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_file_cannot_be_learnt_as_both_modes(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    header = read_header(tiny(tmp_path, "dit", "pruned_nvfp4"))
    learn(header, "fl2va", known)
    with pytest.raises(CheckpointError, match="is listed as fl2va"):
        learn(header, "ref2va", known)
    assert mode_of(header, known) == "fl2va"


def test_only_a_dit_has_a_mode(tmp_path: Path) -> None:
    header = read_header(tiny(tmp_path, "audio_vae", "fp32"))
    assert mode_of(header) == "unknown"
    with pytest.raises(CheckpointError, match="only a DiT has a mode"):
        learn(header, "ref2va", tmp_path / "known.toml")


def test_a_broken_list_of_models_is_one_sentence(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    header = read_header(tiny(tmp_path, "dit", "pruned_nvfp4"))
    for text in ("[[model]]\nmode = 3", "not toml", '[[model]]\nmode = "x"\nsha256 = "1"'):
        known.write_text(text)
        with pytest.raises(ValueError, match=r"known\.toml"):
            mode_of(header, known)


def test_inspect_learns_and_then_shows_the_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    known = ["--known", str(tmp_path / "known.toml")]
    assert main(["inspect", "--learn", "ref2va", str(path), *known]) == 0
    assert "is now known as ref2va" in capsys.readouterr().out
    assert main(["inspect", str(path), *known]) == 0
    assert "mode ref2va" in capsys.readouterr().out


def test_the_shipped_list_is_empty() -> None:
    assert tomllib.loads(KNOWN_MODELS.read_text()) == {}


def test_an_unsupported_file_is_described_and_then_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(
        tiny(tmp_path, "dit", "pruned_nvfp4"),
        lambda tensors: tensors.update({"blocks.0.mlp.fc1.comfy_quant": marker(format="mxfp8")}),
    )
    assert main(["inspect", str(path)]) == 2
    shown = capsys.readouterr()
    assert "MiniMax H3 DiT" in shown.out
    assert "layer blocks.0.mlp.fc1 is quantised as 'mxfp8'" in shown.err
    assert shown.err.count("\n") == 1


def test_a_stray_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(
        tiny(tmp_path, "dit", "pruned_nvfp4"),
        lambda tensors: tensors.update({"blocks.0.attn.to_gate_compress.weight": torch.ones(2)}),
    )
    assert main(["inspect", str(path)]) == 2
    assert "1 tensors are unexpected: blocks.0.attn.to_gate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"GGUF\x03\x00\x00\x00 and more", "is a GGUF file"), (b"hello, world", "not a safetensors")],
)
def test_a_bad_file_through_the_real_command_is_one_sentence(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "launch.py", "inspect", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
