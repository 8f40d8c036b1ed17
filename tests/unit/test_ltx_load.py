"""LTX denoiser files: strict census, markers in three forms, order of NVFP4, loaded modules."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.file import IndexedCheckpoint
from runtime.checkpoints.header import CheckpointError, read_header
from runtime.checkpoints.layouts import Layout
from runtime.checkpoints.load import check_fits
from runtime.checkpoints.roles import ROLES, own_names
from runtime.kernels.attention import Attend
from runtime.kernels.linear.dequant import dequantise
from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.census import ROLE, Census, read_census
from runtime.ltx.demo import random_denoiser, write_denoiser
from runtime.ltx.load import load_connectors, load_denoiser, open_denoiser
from runtime.ltx.model import LTXModel
from runtime.ltx.orders import (
    AUTO,
    ORDERS,
    detected,
    known_order,
    readings,
    scale_structure,
)
from runtime.ltx.published import CONFIG, KEYFRAMES, PREFIX, published
from tests.ltx_files import Edit, config, marker, weights, write_bf16, write_nvfp4
from tests.ltx_files import packed as packed_as

CPU = torch.device("cpu")
LAYER = "transformer_blocks.0.attn1.to_q"
LICENCE_BYTES = 35_950  # of the licence in the header, as each of the three sizes implies


def census_of(path: Path) -> Census:
    return read_census(read_header(path))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def attend() -> Attend:
    return load_ltx_attention("sdpa", config(), CPU, torch.float32)


def load(path: Path, **options: Any) -> LTXModel:
    arguments = {"device": CPU, "dtype": torch.float32, **options}
    return load_denoiser(open_denoiser(path), attend(), **arguments)[0]


# The published file ------------------------------------------------------------------------------


def with_licence(layout: Layout) -> Layout:
    return replace(layout, metadata={**layout.metadata, "license": "x" * LICENCE_BYTES})


@pytest.mark.parametrize(
    ("format", "tensors", "file_bytes"),
    [
        ("nvfp4_bare", 7876, 18_721_432_024),
        ("nvfp4", 7877, 18_721_548_408),
        ("bf16", 4349, 42_018_190_584),
    ],
)
def test_three_published_sizes_come_out_to_the_byte_with_one_licence_length(
    format: str, tensors: int, file_bytes: int
) -> None:
    layout = with_licence(published("full", format))
    assert len(layout.tensors) == tensors
    assert len(layout.header()) + layout.payload_bytes == file_bytes


def test_the_published_header_is_as_long_as_its_holders_say() -> None:
    assert len(with_licence(published("full", "nvfp4_bare")).header()) == 8 + 1_179_408


def test_the_logical_model_has_the_published_counts() -> None:
    specs = published("full", "bf16").tensors
    assert sum(spec.dtype == "F32" for spec in specs) == 290
    assert round(sum(prod(spec.shape) for spec in specs) / 1e9, 2) == 21.00
    assert sum("_embeddings_connector." in spec.name for spec in specs) == 2 * 129


@pytest.mark.parametrize(("format", "markers"), [("nvfp4", "header"), ("nvfp4_bare", "none")])
def test_the_full_census_is_official_with_and_without_markers(format: str, markers: str) -> None:
    checkpoint = random_denoiser("full", format)
    census = checkpoint.census
    assert census.official and not census.problems and not census.unlike_published
    assert (census.markers, census.keyframes) == (markers, format == "nvfp4")
    assert (len(census.index.layers), census.packed_blocks) == (1176, 42)
    assert known_order(census, AUTO) == "high_tiled"


def test_the_full_model_has_the_names_and_shapes_of_the_full_file() -> None:
    checkpoint = random_denoiser("full", "nvfp4")
    with torch.device("meta"):
        model = LTXModel(checkpoint.census.config, attend(), keyframes=True)
    names = [name for name in checkpoint.names() if "_embeddings_connector." not in name]
    check_fits(model, checkpoint, names)
    assert checkpoint.logical_shape("transformer_blocks.41.ff.net.2") == (4096, 16384)


def test_a_full_layer_of_random_weights_has_the_size_of_a_unit_gain() -> None:
    checkpoint = random_denoiser("full", "nvfp4")
    packed = checkpoint.packed("transformer_blocks.3.audio_to_video_attn.to_k")
    weight = dequantise(packed, torch.float32)
    assert weight.shape == (2048, 2048)
    assert weight.std().item() == pytest.approx(2048**-0.5, rel=0.02)
    assert packed.tensors["input_scale"].item() == pytest.approx(6 / 2688)


# Markers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("markers", "kind"),
    [("header", "header"), ("bare", "header"), ("tensors", "tensors"), ("none", "none")],
)
def test_all_forms_of_markers_give_the_same_layers(tmp_path: Path, markers: str, kind: str) -> None:
    census = census_of(write_nvfp4(tmp_path / "a.safetensors", markers=markers))
    assert not census.problems
    assert census.markers == kind
    assert len(census.index.layers) == 28
    assert {quant.format for quant in census.index.layers.values()} == {"nvfp4"}


def test_both_forms_that_say_the_same_are_read(tmp_path: Path) -> None:
    def also(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        layers = {name.removesuffix(".comfy_quant") for name in tensors if "comfy_quant" in name}
        said = {"layers": {layer: {"format": "nvfp4"} for layer in layers}}
        metadata["_quantization_metadata"] = json.dumps(said)

    census = census_of(write_nvfp4(tmp_path / "a.safetensors", also, markers="tensors"))
    assert census.markers == "header and tensors"
    assert not census.problems


@pytest.mark.parametrize("flag", [True, None])
def test_both_forms_that_differ_are_refused(tmp_path: Path, flag: bool | None) -> None:
    def also(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        layers = [name.removesuffix(".comfy_quant") for name in tensors if "comfy_quant" in name]
        said = {layer: {"format": "nvfp4"} for layer in layers if flag or layer != LAYER}
        if flag:
            said[LAYER]["full_precision_matrix_mult"] = True  # type: ignore[assignment]
        metadata["_quantization_metadata"] = json.dumps({"layers": said})

    path = write_nvfp4(tmp_path / "a.safetensors", also, markers="tensors")
    with pytest.raises(
        CheckpointError, match=rf"contradict each other for 1 layers, first {LAYER}"
    ):
        census_of(path)


def test_a_layer_named_twice_in_the_header_with_two_formats_is_refused(tmp_path: Path) -> None:
    def twice(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        said = json.loads(metadata["_quantization_metadata"])
        said["layers"][LAYER] = {"format": "float8_e4m3fn"}
        metadata["_quantization_metadata"] = json.dumps(said)

    path = write_nvfp4(tmp_path / "a.safetensors", twice)
    with pytest.raises(CheckpointError, match=f"names layer {LAYER} twice"):
        census_of(path)


def test_a_packed_layer_that_markers_leave_out_is_listed(tmp_path: Path) -> None:
    def forget(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        del tensors[f"{LAYER}.comfy_quant"]

    problems = census_of(
        write_nvfp4(tmp_path / "a.safetensors", forget, markers="tensors")
    ).problems
    assert any("not floating-point and without a marker" in text for text in problems)
    assert any("3 tensors unexpected" in text for text in problems)


def test_a_header_that_marks_nothing_does_not_vouch_for_packed_layers(tmp_path: Path) -> None:
    def empty(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        metadata["_quantization_metadata"] = '{"format_version": "1.0", "layers": {}}'

    census = census_of(write_nvfp4(tmp_path / "a.safetensors", empty))
    assert not census.index.layers
    with pytest.raises(CheckpointError, match="28 tensors not floating-point and without a marker"):
        census.check()


def test_a_marked_layer_that_is_not_packed_is_refused_by_name(tmp_path: Path) -> None:
    def mark(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["proj_out.comfy_quant"] = marker()

    path = write_nvfp4(tmp_path / "a.safetensors", mark, markers="tensors")
    with pytest.raises(CheckpointError, match=r"nvfp4 layer proj_out has no weight_scale"):
        census_of(path)


# Census ------------------------------------------------------------------------------------------


def drop(name: str) -> Any:
    return lambda tensors, metadata: tensors.pop(name)


def add(name: str) -> Any:
    return lambda tensors, metadata: tensors.update({name: torch.zeros(128)})


def reshape(name: str) -> Any:
    return lambda tensors, metadata: tensors.update({name: tensors[name][:-1].clone()})


def retype(name: str) -> Any:
    return lambda tensors, metadata: tensors.update({name: tensors[name].to(torch.int32)})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (drop("proj_out.bias"), "1 tensors missing: proj_out.bias"),
        (drop(f"{LAYER}.input_scale"), f"1 layers without input_scale, .*: {LAYER}"),
        (drop("transformer_blocks.1.scale_shift_table"), "1 tensors missing: .*scale_shift_table"),
        (add("transformer_blocks.0.ff.net.2.bias"), "1 tensors unexpected: .*ff.net.2.bias"),
        (add("transformer_blocks.2.attn1.to_q.weight"), "1 tensors unexpected: .*blocks.2"),
        (add("first_stage.weight"), "1 tensors unexpected"),
        (reshape("proj_out.weight"), r"1 tensors misshapen: proj_out.weight \[15, 128\]"),
        (reshape("scale_shift_table"), r"misshapen: scale_shift_table \[1, 128\]"),
        (retype("proj_out.weight"), r"without a marker: proj_out.weight \(I32\)"),
        (
            drop("audio_embeddings_connector.learnable_registers"),
            "1 tensors missing: audio_embeddings_connector",
        ),
    ],
)
def test_what_does_not_fit_is_listed_before_anything_is_read(
    tmp_path: Path, edit: Any, said: str
) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", edit)
    with pytest.raises(CheckpointError, match=said):
        open_denoiser(path)


def test_a_layer_without_its_second_scale_is_refused(tmp_path: Path) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", drop(f"{LAYER}.weight_scale_2"))
    with pytest.raises(CheckpointError, match=f"nvfp4 layer {LAYER} has no weight_scale_2"):
        open_denoiser(path)


def test_a_packed_weight_of_another_width_is_told_by_its_logical_shape(tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:, :32].clone()
        tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:, :4].clone()

    path = write_nvfp4(tmp_path / "a.safetensors", halve)
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight \[128, 64\], .* \[128, 128\]"):
        open_denoiser(path)


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for name in [n for n in tensors if n.startswith("transformer_blocks.1.")]:
            del tensors[name]

    with pytest.raises(CheckpointError, match=r"84 tensors missing: .* and 74 more"):
        open_denoiser(write_bf16(tmp_path / "a.safetensors", cut))


def test_other_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    def fp8(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["proj_out.weight"] = tensors["proj_out.weight"].to(torch.float8_e4m3fn)
        tensors["proj_out.weight_scale"] = torch.tensor(1.0)
        tensors["proj_out.comfy_quant"] = marker("float8_e4m3fn")

    path = write_bf16(tmp_path / "a.safetensors", fp8)
    with pytest.raises(CheckpointError, match=r"not nvfp4, .* proj_out \(float8_e4m3fn\)"):
        open_denoiser(path)


def test_the_header_says_licence_release_and_text_tower(tmp_path: Path) -> None:
    census = census_of(write_bf16(tmp_path / "a.safetensors"))
    assert census.license and census.version == "2.5.0"
    assert census.gemma_version == "gemma4-12b-ltx-v1"

    def silent(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        del metadata["license"], metadata["gemma_source_checkpoint"]

    census = census_of(write_bf16(tmp_path / "b.safetensors", silent))
    assert census.license is None and census.gemma_version == "" and not census.problems


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"ltx_version": "2.3.0", "gemma_version": "g"}', "model_version is 2.5.0 and .* 2.3.0"),
        ("[]", "must be a JSON object with gemma_version"),
        ('{"ltx_version": "2.5.0"}', "must be a JSON object with gemma_version"),
    ],
)
def test_a_text_tower_of_another_release_is_refused(tmp_path: Path, text: str, said: str) -> None:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        metadata["gemma_source_checkpoint"] = text

    with pytest.raises(CheckpointError, match=said):
        census_of(write_bf16(tmp_path / "a.safetensors", change))


def test_without_config_nothing_is_opened_and_the_file_is_named(tmp_path: Path) -> None:
    path = write_bf16(tmp_path / "a.safetensors", lambda tensors, metadata: metadata.pop("config"))
    with pytest.raises(CheckpointError, match=rf"^{path}: the header has no config"):
        open_denoiser(path)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        del tensors["audio_adaln_single.linear.weight"]
        metadata.clear()

    path = write_bf16(tmp_path / "a.safetensors", rename)
    with pytest.raises(CheckpointError, match="is not a two-stream LTX denoiser"):
        open_denoiser(path)


def test_keyframes_and_connectors_go_by_presence(tmp_path: Path) -> None:
    path = write_bf16(tmp_path / "a.safetensors", keyframes=False, with_connectors=False)
    census = census_of(path)
    assert (census.keyframes, census.connectors, census.problems) == (False, False, ())
    assert load(path).keyframes_abs_pos_embedding is None
    with pytest.raises(CheckpointError, match="has no connectors"):
        load_connectors(open_denoiser(path), attend(), device=CPU, dtype=torch.float32)
    assert KEYFRAMES in load(write_bf16(tmp_path / "b.safetensors")).state_dict()


def test_another_float_type_is_told_and_read(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["scale_shift_table"] = tensors["scale_shift_table"].to(torch.bfloat16)

    path = write_bf16(tmp_path / "a.safetensors", narrow)
    census = census_of(path)
    assert census.unlike_published == ("scale_shift_table is BF16, published as F32",)
    assert not census.problems
    assert load(path, dtype=torch.bfloat16).scale_shift_table.dtype == torch.bfloat16


# Order of nibbles and scales ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bf16(tmp_path_factory.mktemp("ltx") / "copy.safetensors")


@pytest.mark.parametrize("order", ORDERS)
def test_correlation_tells_every_order(tmp_path: Path, copy: Path, order: str) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", markers="none", order=order)
    found = {reading.order: reading for reading in readings(census_of(path), copy)}
    assert detected(tuple(found.values())) == order
    assert 0.99 < found[order].correlation < 0.998
    assert 0.085 < found[order].relative_rms < 0.115
    assert max(r.correlation for r in found.values() if r.order != order) < 0.5


def test_a_copy_of_other_weights_fits_no_order(tmp_path: Path, copy: Path) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", markers="none", seed=1)
    assert detected(readings(census_of(path), copy)) == ""


@pytest.mark.parametrize("order", ORDERS)
def test_an_unmarked_file_is_refused_until_its_order_is_named(tmp_path: Path, order: str) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", markers="none", order=order)
    with pytest.raises(CheckpointError, match=r"order of nibbles and scales is not known"):
        open_denoiser(path)
    named = open_denoiser(path, order)
    marked = open_denoiser(write_nvfp4(tmp_path / "b.safetensors"))
    for layer in marked.layers:
        got, wanted = named.packed(layer).tensors, marked.packed(layer).tensors
        for suffix, tensor in wanted.items():
            same = torch.equal(as_bytes(got[suffix]), as_bytes(tensor))
            assert same, f"{layer}.{suffix}"


def test_markers_mean_one_order_and_no_other_can_be_named(tmp_path: Path) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors")
    assert open_denoiser(path, "high_tiled").order == open_denoiser(path).order == "high_tiled"
    with pytest.raises(CheckpointError, match="has markers, which mean high_tiled"):
        open_denoiser(path, "low_linear")
    with pytest.raises(ValueError, match="ltx_nvfp4_order must be auto or high_tiled"):
        open_denoiser(path, "swapped")


def test_one_packed_block_more_than_published_is_not_the_published_file() -> None:
    census = random_denoiser("full", "nvfp4_bare").census
    layer = "transformer_blocks.42.attn1.to_q"
    more = {**census.index.layers, layer: census.index.layers[LAYER]}
    other = replace(census, index=replace(census.index, layers=more))
    assert not other.official
    assert not replace(census, unlike_published=("scale_shift_table is BF16",)).official
    assert not replace(census, config=replace(census.config, num_layers=47)).official


def test_an_unquantised_file_has_no_order_to_know(tmp_path: Path, copy: Path) -> None:
    assert open_denoiser(copy).order == "high_tiled"
    with pytest.raises(CheckpointError, match="has no NVFP4 layer"):
        readings(census_of(copy), copy)
    path = write_nvfp4(tmp_path / "a.safetensors", blocks=2)
    with pytest.raises(CheckpointError, match="has no unquantised"):
        readings(census_of(path), path)


# Modules -----------------------------------------------------------------------------------------


def test_every_weight_arrives_where_its_name_says(copy: Path) -> None:
    wanted = {n: t for n, t in weights().items() if "_embeddings_connector." not in n}
    model = load(copy)
    assert model.state_dict().keys() == wanted.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name].float()), name


def test_connectors_come_from_the_same_file(copy: Path) -> None:
    found = load_connectors(open_denoiser(copy), attend(), device=CPU, dtype=torch.bfloat16)
    wanted = {n: t for n, t in weights().items() if "_embeddings_connector." in n}
    assert found.state_dict().keys() == wanted.keys()
    assert all(torch.equal(t, wanted[n]) for n, t in found.state_dict().items())


def test_any_linear_may_be_packed(tmp_path: Path) -> None:
    wanted = {}

    def pack(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        for layer in ("audio_embeddings_connector.transformer_1d_blocks.0.ff.net.2", "proj_out"):
            for suffix, tensor in packed_as(tensors.pop(f"{layer}.weight")).items():
                tensors[f"{layer}.{suffix}"] = tensor
            tensors[f"{layer}.comfy_quant"] = marker()
            wanted[layer] = tensors[f"{layer}.weight"]

    checkpoint = open_denoiser(write_bf16(tmp_path / "a.safetensors", pack))
    where = {"device": CPU, "dtype": torch.float32}
    modules = (
        load_connectors(checkpoint, attend(), **where),
        load_denoiser(checkpoint, attend(), **where)[0],
    )
    for module, (layer, codes) in zip(modules, wanted.items(), strict=True):
        assert torch.equal(module.get_submodule(layer).weight, codes)


def test_tables_stay_f32_and_comfy_rounds_them(copy: Path) -> None:
    kept, rounded = (load(copy, dtype=torch.bfloat16, tables=t) for t in ("fp32", "comfy"))
    stored = weights()
    names = [name for name in kept.state_dict() if "scale_shift_table" in name]
    assert len(names) == 2 + 2 * 6
    for name in names:
        assert torch.equal(kept.state_dict()[name], stored[name])
        assert torch.equal(rounded.state_dict()[name], stored[name].bfloat16())
    others = kept.state_dict().keys() - set(names)
    assert {kept.state_dict()[name].dtype for name in others} == {torch.bfloat16}


def test_another_word_for_the_tables_is_refused(copy: Path) -> None:
    with pytest.raises(ValueError, match="tables must be fp32 or comfy, got 'bf16'"):
        load(copy, tables="bf16")


def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        tensors["proj_out.bias"][0] = torch.nan

    path = write_bf16(tmp_path / "a.safetensors", spoil)
    with pytest.raises(CheckpointError, match=r"proj_out\.bias holds NaN or infinity"):
        load(path)


@pytest.mark.parametrize(
    ("suffix", "value", "said"),
    [
        ("weight_scale", float("nan"), "holds NaN or negative scales"),
        ("weight_scale", -1.0, "holds NaN or negative scales"),
        ("input_scale", 0.0, "input_scale is 0, which no activation can be divided by"),
        ("input_scale", -2.0, "input_scale is -2, which no activation can be divided by"),
    ],
)
def test_a_scale_that_cannot_be_is_refused_by_name(
    tmp_path: Path, suffix: str, value: float, said: str
) -> None:
    def spoilt(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        name = next(name for name in tensors if name.endswith(f"{LAYER}.{suffix}"))
        tensors[name] = torch.full(tensors[name].shape, value).to(tensors[name].dtype)

    path = write_nvfp4(tmp_path / "x.safetensors", spoilt)
    with pytest.raises(CheckpointError, match=said):
        load(path)


def test_a_tensor_with_and_without_prefix_is_refused() -> None:
    names = [f"{PREFIX}{name}" for name in (*ROLES[ROLE].keys, "proj_out.bias")]
    assert own_names(names, ROLE, Path("x"))["proj_out.bias"] == names[-1]
    for doubled in ([*names, "proj_out.bias"], ["proj_out.bias", *names]):
        with pytest.raises(CheckpointError, match=r"the tensor proj_out\.bias twice"):
            own_names(doubled, ROLE, Path("x"))


@pytest.mark.parametrize("name", ["num_layers", "connector_num_layers"])
def test_more_layers_than_tensors_are_refused_at_once(tmp_path: Path, name: str) -> None:
    def endless(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        document = json.loads(metadata["config"])
        document["transformer"][name] = 10**7
        metadata["config"] = json.dumps(document)

    path = write_bf16(tmp_path / "x.safetensors", endless)
    with pytest.raises(CheckpointError, match=f"{name} 10000000, and the file has only"):
        census_of(path)


def test_progress_ends_at_all_the_bytes_of_the_denoiser(copy: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint: IndexedCheckpoint = open_denoiser(copy)
    load(copy, progress=lambda done, total: seen.append((done, total)))
    size = sum(
        checkpoint.dtype(name).itemsize * prod(checkpoint.shape(name))
        for name in checkpoint.names()
        if "_embeddings_connector." not in name
    )
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_the_published_table_is_the_config_of_the_full_layout() -> None:
    said = json.loads(published("full", "bf16").metadata["config"])
    assert said == {"transformer": dict(CONFIG)}


def with_rows(spread: float, order: str) -> Edit:
    """Rows of the packed layers get sizes of their own, as those of trained weights have."""

    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
            layer = name.removesuffix(".weight_scale_2")
            rows, half = tensors[f"{layer}.weight"].shape
            sizes = (spread * torch.randn(rows, 1, generator=generator)).exp()
            weight = torch.randn(rows, 2 * half, generator=generator) * sizes
            tensors.update({f"{layer}.{k}": t for k, t in packed_as(weight, order).items()})

    return change


@pytest.mark.parametrize("order", ["high_tiled", "high_linear"])
def test_the_scales_of_uneven_rows_hint_at_their_order(tmp_path: Path, order: str) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", with_rows(0.5, order), markers="none")
    found = scale_structure(census_of(path))
    assert found is not None
    assert found.points_to == order.removeprefix("high_")


def test_even_scales_hint_at_nothing_and_padded_ones_are_left_out(tmp_path: Path) -> None:
    path = write_nvfp4(tmp_path / "a.safetensors", with_rows(0.0, "high_tiled"), markers="none")
    found = scale_structure(census_of(path))
    assert found is not None
    assert found.points_to == ""
    write_denoiser(tmp_path / "b.safetensors", size="tiny", format="nvfp4_bare")
    census = census_of(tmp_path / "b.safetensors")
    padded = "transformer_blocks.0.audio_attn1.to_q"
    shapes = {padded: census.index.shapes[padded]}
    assert scale_structure(replace(census, index=replace(census.index, shapes=shapes))) is None
