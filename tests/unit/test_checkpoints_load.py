"""load_into fills a module exactly, or says what is missing, left over or of a wrong shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.demo import random_checkpoint
from runtime.checkpoints.file import open_file
from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.load import LoadReport, load_into
from tests.checkpoint_files import Packed, edited, meta_module, tiny

LAYER = "blocks.1.attn.qkv_proj"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny(tmp_path, "dit", "pruned_nvfp4")


def _load(module: nn.Module, path: Path, **options: object) -> LoadReport:
    settings = {
        "device": "cpu",
        "dtype_of": lambda name, stored: stored,
        "build_linear": lambda packed, old: Packed(packed),
    }
    return load_into(module, open_checkpoint(path, "dit"), **{**settings, **options})  # type: ignore[arg-type]


def test_every_tensor_arrives_and_quantised_layers_are_built(path: Path) -> None:
    checkpoint = open_file(path, "dit")
    module = meta_module(checkpoint)
    old = module.get_submodule(LAYER)
    seen: dict[str, nn.Module] = {}

    def build(packed: object, module: nn.Module) -> nn.Module:
        seen[packed.layer] = module  # type: ignore[attr-defined]
        return Packed(packed)  # type: ignore[arg-type]

    report = _load(module, path, build_linear=build)
    assert set(seen) == set(checkpoint.layers)
    assert seen[LAYER] is old
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, checkpoint.tensor(name)), name
    built = module.get_submodule(LAYER)
    assert isinstance(built, Packed)
    want = checkpoint.packed(LAYER)
    assert built.packed.shape == want.shape
    assert all(torch.equal(built.packed.tensors[n], t) for n, t in want.tensors.items())
    assert report.bytes == sum(checkpoint.tensor(name).nbytes for name in checkpoint.names())


def test_dtype_of_decides_what_a_plain_tensor_becomes(path: Path) -> None:
    module = meta_module(open_file(path, "dit"))
    asked: dict[str, torch.dtype] = {}

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        asked[name] = stored
        return torch.float64 if name == "rope.inv_freq" else torch.bfloat16

    _load(module, path, dtype_of=dtype_of)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert dtypes.pop("rope.inv_freq") == torch.float64
    assert set(dtypes.values()) == {torch.bfloat16}
    assert asked["video_patch_proj.weight"] == torch.float32
    assert not any(name.startswith(LAYER) for name in asked)


def test_progress_reaches_the_total_in_file_bytes(path: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = _load(
        meta_module(open_file(path, "dit")),
        path,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == sorted(steps)
    assert steps[-1] == (report.bytes, report.bytes)


def test_buffers_are_filled_and_non_persistent_ones_are_not_expected(path: Path) -> None:
    module = meta_module(open_file(path, "dit"))
    rope = module.get_submodule("rope")
    del rope.inv_freq
    rope.register_buffer("inv_freq", torch.empty(16, device="meta"))
    rope.register_buffer("cache", torch.zeros(4), persistent=False)
    _load(module, path)
    assert rope.get_buffer("inv_freq")[0] == 1.0
    assert torch.equal(rope.get_buffer("cache"), torch.zeros(4))
    assert "rope.inv_freq" not in dict(module.named_parameters())


def test_ignored_tensors_are_neither_expected_nor_read(path: Path) -> None:
    module = meta_module(open_file(path, "dit"))
    del module._parameters["adaln_t_table"]
    _load(module, path, ignore=frozenset({"adaln_t_table"}))
    with pytest.raises(CheckpointError, match="1 tensors unexpected: adaln_t_table"):
        _load(module, path)


def test_missing_and_extra_tensors_are_listed_before_anything_is_read(path: Path) -> None:
    module = meta_module(open_file(path, "dit"))
    module.add_module("extra", nn.Linear(2, 2, device="meta"))
    del module.get_submodule("blocks")._modules["1"]
    with pytest.raises(CheckpointError) as error:
        _load(module, path)
    assert "2 tensors missing: extra.bias, extra.weight" in str(error.value)
    assert "10 tensors unexpected: blocks.1.adaln_proj.linear.bias" in str(error.value)
    assert module.get_submodule("video_patch_proj").get_parameter("weight").is_meta


def test_only_the_first_ten_names_are_listed(path: Path) -> None:
    module = meta_module(open_file(path, "dit"))
    del module._modules["blocks"]
    with pytest.raises(CheckpointError, match=r"30 tensors unexpected: .* and 20 more"):
        _load(module, path)


@pytest.mark.parametrize(
    ("name", "shape", "got"),
    [
        ("video_patch_proj.weight", (128, 95), [128, 96]),
        (f"{LAYER}.weight", (1536, 64), [1536, 128]),
    ],
)
def test_a_wrong_shape_names_the_tensor_and_both_shapes(
    path: Path, name: str, shape: tuple[int, int], got: list[int]
) -> None:
    module = meta_module(open_file(path, "dit"))
    owner, leaf = name.rsplit(".", 1)
    wrong = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    module.get_submodule(owner).register_parameter(leaf, wrong)
    with pytest.raises(CheckpointError) as error:
        _load(module, path)
    said = f"{name} has shape {got} in the checkpoint, the model wants {list(shape)}"
    assert said in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["video_patch_proj.weight", "adaln_t_table"])
def test_a_weight_that_is_not_finite_is_refused_by_name(
    path: Path, name: str, value: float
) -> None:
    bad = edited(path, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity as float32"):
        _load(meta_module(open_file(bad, "dit")), bad)


def test_a_scale_of_a_quantised_layer_that_is_not_finite_is_refused_by_name(path: Path) -> None:
    name = f"{LAYER}.weight_scale_2"
    bad = edited(path, lambda tensors: tensors[name].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        _load(meta_module(open_file(bad, "dit")), bad)


def test_a_weight_too_large_for_the_type_it_becomes_is_refused(path: Path) -> None:
    name = "video_patch_proj.weight"
    big = edited(path, lambda tensors: tensors[name].view(-1)[:1].fill_(1e6))
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity as float16"):
        _load(meta_module(open_file(big, "dit")), big, dtype_of=lambda name, stored: torch.float16)


def test_a_file_that_shrinks_while_open_is_an_error_not_zeros(path: Path) -> None:
    checkpoint = open_checkpoint(path, "dit")
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 40_000)
    with pytest.raises(CheckpointError, match="bytes are missing"):
        for name in checkpoint.names():
            checkpoint.tensor(name)


def test_an_in_memory_random_checkpoint_loads_like_its_file(tmp_path: Path) -> None:
    file = open_file(tiny(tmp_path, "dit", "full_fp8", seed=3), "dit")
    memory = random_checkpoint("dit", size="tiny", format="full_fp8", seed=3)
    assert memory.names() == file.names()
    assert memory.layers == file.layers
    for name in file.names():
        flat = [c.tensor(name).view(-1).view(torch.uint8) for c in (memory, file)]
        assert torch.equal(flat[0], flat[1]), name
    module = meta_module(memory)
    load_into(
        module,
        memory,
        device="cpu",
        dtype_of=lambda name, stored: stored,
        build_linear=lambda packed, old: Packed(packed),
    )
    assert torch.equal(
        module.get_submodule("time_embedder.proj_in").get_parameter("weight"),
        file.tensor("time_embedder.proj_in.weight"),
    )


def test_a_bias_of_a_quantised_layer_travels_with_it(tmp_path: Path) -> None:
    path = tiny(tmp_path, "video_vae", "int8_convrot")
    checkpoint = open_file(path, "video_vae")
    layer = "decoder.transformer_blocks.0.attn.to_qkv"
    module = meta_module(checkpoint)
    load_into(
        module,
        checkpoint,
        device="cpu",
        dtype_of=lambda name, stored: stored,
        build_linear=lambda packed, old: Packed(packed),
    )
    built = module.get_submodule(layer)
    assert isinstance(built, Packed)
    assert torch.equal(built.packed.tensors["bias"], checkpoint.tensor(f"{layer}.bias"))
    edited_path = edited(path, lambda tensors: tensors.pop(f"{layer}.bias"))
    without = open_file(edited_path, "video_vae")
    with pytest.raises(CheckpointError, match=f"1 tensors missing: {layer}.bias"):
        load_into(
            meta_module(checkpoint),
            without,
            device="cpu",
            dtype_of=lambda name, stored: stored,
            build_linear=lambda packed, old: Packed(packed),
        )
