"""make-demo writes random checkpoints in the exact published layouts."""

from __future__ import annotations

import os
import shutil
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from launch import main
from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.demo import write_random
from runtime.checkpoints.header import read_header
from runtime.checkpoints.published import FORMATS, published
from tests.checkpoint_files import expected_layouts, read_all, sparse, tiny

TINY = [(role, format) for role, formats in FORMATS["tiny"].items() for format in formats]


@pytest.mark.parametrize(("role", "format"), TINY)
def test_tiny_files_have_the_keys_dtypes_shapes_and_size_of_the_goldens(
    tmp_path: Path, role: str, format: str
) -> None:
    size, expected = expected_layouts()[f"{role} {format}"]
    header = read_header(tiny(tmp_path, role, format))
    assert {name: (info.dtype, info.shape) for name, info in header.tensors.items()} == expected
    assert header.file_bytes == size


@pytest.mark.parametrize(
    ("role", "format", "tensors", "header", "payload"),
    [
        ("dit", "pruned_nvfp4", 1132, 116_008, 12_528_520_792),
        ("dit", "pruned_int8", 932, 95_424, 20_970_284_192),
        ("dit", "pruned_bf16", 532, 55_984, 40_225_668_192),
        ("dit", "full_bf16", 535, None, 66_280_430_144),
        ("text_encoder", "nvfp4_awq", 2054, 231_408, 15_686_911_143),
        ("text_encoder", "bf16", 902, None, None),
        ("video_vae", "fp16", 562, None, 2 * 2_603_871_080 + 2 * 48),
        ("audio_vae", "fp32", 917, None, 4 * 151_287_320),
    ],
)
def test_full_size_layouts_have_the_published_byte_counts(
    role: str, format: str, tensors: int, header: int | None, payload: int | None
) -> None:
    layout = published(role, size="full", format=format)
    assert len(layout.tensors) == tensors
    if header is not None:
        assert len(layout.header()) == header
    if payload is not None:
        assert layout.payload_bytes == payload


@pytest.mark.parametrize(
    ("format", "numbers"), [("full_bf16", 33_122_992_912), ("pruned_bf16", 20_111_438_744)]
)
def test_full_size_dits_have_the_published_parameter_count(format: str, numbers: int) -> None:
    layout = published("dit", size="full", format=format)
    assert sum(prod(spec.shape) for spec in layout.tensors) == numbers


def test_a_full_size_header_reads_back_and_every_layer_passes_its_checks(tmp_path: Path) -> None:
    for role, format, layers in (
        ("dit", "pruned_nvfp4", 200),
        ("dit", "pruned_int8", 200),
        ("text_encoder", "nvfp4_awq", 351),
        ("video_vae", "int8_convrot", 144),
    ):
        path = sparse(tmp_path, role, format)
        assert len(open_checkpoint(path, role).layers) == layers


@pytest.mark.parametrize(("role", "format"), TINY)
def test_random_values_are_finite(tmp_path: Path, role: str, format: str) -> None:
    tensors, _ = read_all(tiny(tmp_path, role, format))
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            assert tensor.float().isfinite().all(), name


def _nvfp4_values(packed: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1).int()
    return table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


@pytest.mark.parametrize("format", ["pruned_bf16", "pruned_nvfp4", "pruned_int8", "full_fp8"])
@pytest.mark.parametrize(("layer", "columns"), [("attn.qkv_proj", 128), ("mlp.fc2", 384)])
def test_weights_have_the_deviation_of_a_trained_layer_in_every_format(
    tmp_path: Path, format: str, layer: str, columns: int
) -> None:
    tensors, _ = read_all(tiny(tmp_path, "dit", format))
    name = f"blocks.0.{layer}"
    weight = tensors[f"{name}.weight"]
    if format == "pruned_nvfp4":
        scales = tensors[f"{name}.weight_scale"].float().square().mean().sqrt()
        std = _nvfp4_values(weight).std() * scales * tensors[f"{name}.weight_scale_2"]
    else:
        std = (weight.float() * tensors.get(f"{name}.weight_scale", torch.ones(()))).std()
    assert std * columns**0.5 == pytest.approx(1.0, rel=0.1)


def test_scale_bytes_outside_a_layer_are_zero_in_tile_order(tmp_path: Path) -> None:
    tensors, _ = read_all(tiny(tmp_path, "text_encoder", "nvfp4_awq"))
    scales = tensors["model.layers.0.mlp.down_proj.weight_scale"].view(torch.uint8).flatten()
    used = torch.zeros(128 * 4, dtype=torch.bool)
    for row in range(16):  # [16, 48]: 16 rows and 3 blocks of the 128x4 tile
        for block in range(3):
            used[(row % 32) * 16 + (row // 32) * 4 + block] = True
    assert (scales[used] > 0).all()
    assert (scales[~used] == 0).all()


def test_one_seed_gives_one_file_and_another_seed_another(tmp_path: Path) -> None:
    first = tiny(tmp_path, "dit", "pruned_nvfp4", seed=1).read_bytes()
    assert tiny(tmp_path, "dit", "pruned_nvfp4", seed=1).read_bytes() == first
    assert tiny(tmp_path, "dit", "pruned_nvfp4", seed=2).read_bytes() != first


def test_a_full_disk_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(total=10, used=9, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(ValueError, match=r"0\.0 GiB free, this file needs 11\.7 GiB"):
        write_random(tmp_path / "x.safetensors", "dit", size="full", format="pruned_nvfp4")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tiny(tmp_path, "dit", "pruned_nvfp4")
    assert list(tmp_path.iterdir()) == []


def test_make_demo_writes_the_whole_tiny_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["make-demo", "--size", "tiny", "--seed", "5", "--out", str(tmp_path)]
    assert main([*command, "--format", "pruned_int8"]) == 0
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [
        "random_tiny_audio_vae_fp32.safetensors",
        "random_tiny_dit_pruned_int8.safetensors",
        "random_tiny_text_encoder_nvfp4_awq.safetensors",
        "random_tiny_video_vae_fp16.safetensors",
    ]
    assert capsys.readouterr().out.count("GiB/s") == 4
    for role in FORMATS["tiny"]:
        path = next(tmp_path.glob(f"*_{role}_*"))
        assert open_checkpoint(path, role).names()


def test_make_demo_only_writes_what_is_asked_for(tmp_path: Path) -> None:
    command = ["make-demo", "--size", "tiny", "--out", str(tmp_path), "--only", "audio_vae"]
    assert main(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["random_tiny_audio_vae_fp32.safetensors"]


def test_a_format_that_a_size_does_not_have_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make-demo", "--format", "full_fp8", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "the full dit comes as pruned_nvfp4" in said and said.count("\n") == 1


def test_the_published_text_encoder_size_is_hit_to_the_byte() -> None:
    layout = published("text_encoder", size="full", format="nvfp4_awq")
    assert len(layout.header()) + layout.payload_bytes == 15_687_142_551


def test_header_bytes_are_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    tensors, metadata = read_all(path)
    again = tmp_path / "again.safetensors"
    save_file(tensors, str(again), metadata=metadata)
    assert again.read_bytes() == path.read_bytes()
