"""Markers, prefixes and layers of every on-disk format: accepted exactly, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.layer import LayerQuant
from tests.checkpoint_files import Tensors, edited, marker, raw_file, read_all, tiny

LAYER = "blocks.1.attn.qkv_proj"
FILES = [
    ("dit", "full_bf16"),
    ("dit", "full_fp8"),
    ("dit", "pruned_bf16"),
    ("dit", "pruned_int8"),
    ("dit", "pruned_nvfp4"),
    ("text_encoder", "bf16"),
    ("text_encoder", "nvfp4_awq"),
    ("video_vae", "fp16"),
    ("video_vae", "int8_convrot"),
    ("audio_vae", "fp32"),
]


@pytest.fixture
def nvfp4(tmp_path: Path) -> Path:
    return tiny(tmp_path, "dit", "pruned_nvfp4")


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return tiny(tmp_path, "dit", "full_fp8")


@pytest.fixture
def int8(tmp_path: Path) -> Path:
    return tiny(tmp_path, "dit", "pruned_int8")


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(flat[0], flat[1])


@pytest.mark.parametrize(("role", "format"), FILES)
def test_every_tensor_is_read_byte_for_byte(tmp_path: Path, role: str, format: str) -> None:
    path = tiny(tmp_path, role, format)
    checkpoint = open_checkpoint(path, role)
    tensors, _ = read_all(path)
    stored = {name for name in tensors if not name.endswith(".comfy_quant")}
    assert set(checkpoint.names()) == stored
    for name in stored:
        assert checkpoint.shape(name) == tuple(tensors[name].shape)
        assert checkpoint.dtype(name) == tensors[name].dtype
        assert _same_bytes(checkpoint.tensor(name), tensors[name])


def test_every_tensor_owns_aligned_memory(nvfp4: Path) -> None:
    checkpoint = open_checkpoint(nvfp4, "dit")
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        assert tensor.data_ptr() % 64 == 0, name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    name = "video_patch_proj.weight"
    first = checkpoint.tensor(name)
    first.zero_()
    assert checkpoint.tensor(name).abs().sum() > 0


def test_a_file_without_markers_is_not_quantised(tmp_path: Path) -> None:
    assert not open_checkpoint(tiny(tmp_path, "dit", "pruned_bf16"), "dit").quantised


def test_nvfp4_layers_stay_packed(nvfp4: Path) -> None:
    checkpoint = open_checkpoint(nvfp4, "dit")
    packed = checkpoint.packed(LAYER)
    assert checkpoint.quantised and len(checkpoint.layers) == 20
    assert packed.quant == LayerQuant(format="nvfp4")
    assert packed.shape == (1536, 128)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in packed.tensors.items()} == {
        "weight": (torch.uint8, (1536, 64)),
        "weight_scale": (torch.float8_e4m3fn, (1536, 8)),
        "weight_scale_2": (torch.float32, ()),
    }


def test_optional_scales_of_nvfp4_are_handed_over(nvfp4: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{LAYER}.input_scale"] = torch.tensor(0.5)
        tensors[f"{LAYER}.pre_quant_scale"] = torch.ones(128, dtype=torch.bfloat16)

    packed = open_checkpoint(edited(nvfp4, add), "dit").packed(LAYER)
    assert packed.tensors["input_scale"] == 0.5
    assert packed.tensors["pre_quant_scale"].shape == (128,)


def test_scales_stored_as_bytes_are_viewed_as_float8(nvfp4: Path, fp8: Path) -> None:
    def to_bytes(suffix: str) -> Callable[[Tensors], None]:
        def edit(tensors: Tensors) -> None:
            name = f"{LAYER}.{suffix}"
            tensors[name] = tensors[name].view(torch.uint8)

        return edit

    for path, suffix in ((nvfp4, "weight_scale"), (fp8, "weight")):
        want = open_checkpoint(path, "dit").packed(LAYER).tensors[suffix]
        checkpoint = open_checkpoint(edited(path, to_bytes(suffix)), "dit")
        assert checkpoint.dtype(f"{LAYER}.{suffix}") == torch.uint8
        assert _same_bytes(checkpoint.packed(LAYER).tensors[suffix], want)


def test_e5m2_bytes_are_viewed_as_e5m2(fp8: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].view(torch.uint8)
        tensors[f"{LAYER}.comfy_quant"] = marker(format="float8_e5m2")

    packed = open_checkpoint(edited(fp8, edit), "dit").packed(LAYER)
    assert packed.tensors["weight"].dtype == torch.float8_e5m2


def test_int8_rotation_groups_are_read_per_layer(int8: Path) -> None:
    layers = open_checkpoint(int8, "dit").layers
    assert layers[LAYER] == LayerQuant(format="int8_tensorwise", convrot_group=64)
    assert layers["blocks.1.attn.out_proj"].convrot_group == 256


def test_int8_without_rotation_and_with_one_scale_is_accepted(int8: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.comfy_quant"] = marker(format="int8_tensorwise")
        tensors[f"{LAYER}.weight_scale"] = torch.tensor(0.01)

    checkpoint = open_checkpoint(edited(int8, edit), "dit")
    assert checkpoint.layers[LAYER] == LayerQuant(format="int8_tensorwise")


def test_one_file_may_mix_formats_and_plain_layers(nvfp4: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for suffix in ("comfy_quant", "weight_scale", "weight_scale_2"):
            del tensors[f"{LAYER}.{suffix}"]
        tensors[f"{LAYER}.weight"] = torch.zeros(1536, 128, dtype=torch.bfloat16)
        fc2 = "blocks.0.mlp.fc2"
        del tensors[f"{fc2}.weight_scale_2"]
        tensors[f"{fc2}.weight"] = torch.zeros(128, 384, dtype=torch.int8)
        tensors[f"{fc2}.weight_scale"] = torch.ones(128, 1)
        tensors[f"{fc2}.comfy_quant"] = marker(format="int8_tensorwise")

    checkpoint = open_checkpoint(edited(nvfp4, edit), "dit")
    assert LAYER not in checkpoint.layers
    assert checkpoint.layers["blocks.0.mlp.fc2"].format == "int8_tensorwise"
    assert len(checkpoint.layers) == 19


@pytest.mark.parametrize(
    "text",
    [
        b'{"format":"nvfp4","full_precision_matrix_mult":true}',
        b'{ "full_precision_matrix_mult" : true , "format" : "nvfp4" }',
    ],
)
def test_a_marker_is_read_with_and_without_spaces(nvfp4: Path, text: bytes) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)

    quant = open_checkpoint(edited(nvfp4, edit), "dit").layers[LAYER]
    assert quant == LayerQuant(format="nvfp4", full_precision=True)


def test_markers_in_the_header_are_accepted(fp8: Path) -> None:
    checkpoint = open_checkpoint(fp8, "dit")
    assert len(checkpoint.layers) == 20 and checkpoint.quantised
    assert checkpoint.layers[LAYER] == LayerQuant(format="float8_e4m3fn")


def test_a_marker_tensor_overrides_the_header(fp8: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{LAYER}.comfy_quant"] = marker(
            format="float8_e4m3fn", full_precision_matrix_mult=True
        )

    layers = open_checkpoint(edited(fp8, edit), "dit").layers
    assert layers[LAYER].full_precision
    assert not layers["blocks.0.mlp.fc1"].full_precision


def _legacy(path: Path, flags: int) -> Path:
    """The same weights as a scaled_fp8 file; one input scale is 1, one is 2."""

    def edit(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(".weight_scale")]:
            layer = name.removesuffix(".weight_scale")
            tensors[f"{layer}.scale_weight"] = tensors.pop(name)
        tensors["blocks.0.mlp.fc1.scale_input"] = torch.tensor(1.0)
        tensors["blocks.0.mlp.fc2.scale_input"] = torch.tensor(2.0)
        tensors["scaled_fp8"] = torch.zeros(flags, dtype=torch.float8_e4m3fn)

    return edited(path, edit, metadata={})


def test_a_legacy_scaled_fp8_file_reads_like_a_marked_one(fp8: Path) -> None:
    want = open_checkpoint(fp8, "dit")
    got = open_checkpoint(_legacy(fp8, 0), "dit")
    assert got.layers == want.layers and got.quantised
    assert set(got.names()) == {*want.names(), "blocks.0.mlp.fc2.input_scale"}
    assert got.packed("blocks.0.mlp.fc2").tensors["input_scale"] == 2.0
    assert "input_scale" not in got.packed("blocks.0.mlp.fc1").tensors
    scale = want.packed(LAYER).tensors["weight_scale"]
    assert torch.equal(got.packed(LAYER).tensors["weight_scale"], scale)


def test_a_two_element_scaled_fp8_asks_for_full_precision(fp8: Path) -> None:
    assert open_checkpoint(_legacy(fp8, 2), "dit").layers[LAYER].full_precision


PREFIXES = ["", "diffusion_model.", "model.diffusion_model.", "model.model.", "net."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_dit_prefixes_are_stripped(nvfp4: Path, prefix: str) -> None:
    want = open_checkpoint(nvfp4, "dit")
    got = open_checkpoint(edited(nvfp4, rename=lambda name: prefix + name), "dit")
    assert set(got.names()) == set(want.names())
    assert got.layers == want.layers
    name = "blocks.2.mlp.fc1.weight"
    assert torch.equal(got.tensor(name), want.tensor(name))


def test_prefixed_layer_names_in_the_header_are_stripped_too(fp8: Path) -> None:
    _, metadata = read_all(fp8)
    markers = json.loads(metadata["_quantization_metadata"])
    prefix = "model.diffusion_model."
    markers["layers"] = {prefix + name: m for name, m in markers["layers"].items()}
    path = edited(
        fp8,
        rename=lambda name: prefix + name,
        metadata={"_quantization_metadata": json.dumps(markers)},
    )
    assert open_checkpoint(path, "dit").layers == open_checkpoint(fp8, "dit").layers


def test_an_all_in_one_file_gives_each_role_its_own_tensors(tmp_path: Path) -> None:
    parts = {
        "dit": ("pruned_nvfp4", "model.diffusion_model."),
        "text_encoder": ("nvfp4_awq", "text_encoders.qwen3vl_32b.transformer."),
        "video_vae": ("fp16", "vae."),
        "audio_vae": ("fp32", "audio_vae."),
    }
    everything: Tensors = {}
    for role, (format, prefix) in parts.items():
        tensors, _ = read_all(tiny(tmp_path, role, format))
        everything |= {prefix + name: tensor for name, tensor in tensors.items()}
    other = tiny(tmp_path, "dit", "pruned_bf16")
    whole = edited(other, lambda tensors: (tensors.clear(), tensors.update(everything)))
    for role, (format, _) in parts.items():
        alone = open_checkpoint(tmp_path / f"{role}_{format}_0.safetensors", role)
        inside = open_checkpoint(whole, role)
        assert set(inside.names()) == set(alone.names())
        assert inside.layers == alone.layers


def _mark(layer: str = LAYER, **options: object) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{layer}.comfy_quant"] = marker(**options)

    return edit


@pytest.mark.parametrize("name", ["mxfp8", "convrot_w4a4", "asym_w4a8_int8", "nf4", "svdquant"])
def test_an_unsupported_format_is_refused_by_name_and_layer(nvfp4: Path, name: str) -> None:
    path = edited(nvfp4, _mark(format=name))
    with pytest.raises(CheckpointError, match=f"layer {LAYER} is quantised as '{name}'"):
        open_checkpoint(path, "dit")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "nvfp4", "convrot": True}, f"layer {LAYER} is rotated nvfp4 .*'convrot'"),
        ({"format": "nvfp4", "convrot": False}, f"layer {LAYER} is rotated nvfp4 .*'convrot'"),
        ({"format": "nvfp4", "block": 32}, f"layer {LAYER} is nvfp4 with .* 'block'"),
        ({"format": "nvfp4", "full_precision_matrix_mult": 1}, "must be true or false"),
        ({"fmt": "nvfp4"}, f"marker of layer {LAYER} names no format"),
    ],
)
def test_an_unknown_marker_option_is_refused_by_layer(
    nvfp4: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(edited(nvfp4, _mark(**options)), "dit")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_point": True}, f"layer {LAYER} is int8_tensorwise with .* 'zero_point'"),
        ({"convrot": "yes"}, "convrot must be true or false"),
        ({"convrot": True}, "convrot_groupsize must be a power of 4"),
        ({"convrot": True, "convrot_groupsize": 128}, "convrot_groupsize must be a power of 4"),
        ({"convrot": True, "convrot_groupsize": 256}, "not a multiple of its rotation group 256"),
    ],
)
def test_int8_with_odd_options_is_refused(
    int8: Path, options: dict[str, object], said: str
) -> None:
    path = edited(int8, _mark(format="int8_tensorwise", **options))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path, "dit")


def test_rotated_nvfp4_that_only_its_metadata_shows_is_refused(nvfp4: Path) -> None:
    path = edited(nvfp4, metadata={"quantizer": "hadamard-rotated nvfp4"})
    with pytest.raises(CheckpointError, match=r"layer blocks\.\S+ is rotated nvfp4"):
        open_checkpoint(path, "dit")


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2", "weight"])
def test_a_missing_tensor_of_a_layer_names_the_layer(nvfp4: Path, suffix: str) -> None:
    path = edited(nvfp4, lambda tensors: tensors.pop(f"{LAYER}.{suffix}"))
    with pytest.raises(CheckpointError, match=f"nvfp4 layer {LAYER} has no {suffix}"):
        open_checkpoint(path, "dit")


@pytest.mark.parametrize(
    ("suffix", "tensor", "said"),
    [
        ("weight_scale", torch.zeros(1536, 4, dtype=torch.float8_e4m3fn), r"\[1536, 8\]"),
        ("weight_scale", torch.zeros(1536, 8), "is F32, it must be F8_E4M3 or U8"),
        ("weight_scale_2", torch.ones(2), r"shape \[2\], it must be"),
        ("weight", torch.zeros(1536, 60, dtype=torch.uint8), "needs a multiple of 16"),
        ("weight", torch.zeros(1536, 64, dtype=torch.int8), "is I8, it must be U8"),
        ("weight", torch.zeros(4, 2, 8, dtype=torch.uint8), "has 2 dimensions"),
        ("pre_quant_scale", torch.ones(64), r"shape \[64\], it must be \[128\]"),
        ("codebook", torch.ones(16), "unexpected tensor codebook"),
    ],
)
def test_a_wrong_tensor_of_a_layer_is_refused_by_name(
    nvfp4: Path, suffix: str, tensor: torch.Tensor, said: str
) -> None:
    path = edited(nvfp4, lambda tensors: tensors.update({f"{LAYER}.{suffix}": tensor}))
    with pytest.raises(CheckpointError, match=said) as error:
        open_checkpoint(path, "dit")
    assert LAYER in str(error.value)


def test_a_marker_that_is_no_json_is_refused_by_layer(nvfp4: Path) -> None:
    text = torch.tensor(list(b"nvfp4"), dtype=torch.uint8)
    path = edited(nvfp4, lambda tensors: tensors.update({f"{LAYER}.comfy_quant": text}))
    with pytest.raises(CheckpointError, match=f"marker of layer {LAYER} is not JSON"):
        open_checkpoint(path, "dit")


def test_a_newer_header_marker_version_is_refused(fp8: Path) -> None:
    path = edited(fp8, metadata={"_quantization_metadata": '{"format_version":"2.0","layers":{}}'})
    with pytest.raises(CheckpointError, match=r"version 2\.0; supported: 1\.x"):
        open_checkpoint(path, "dit")


@pytest.mark.parametrize(
    "metadata", [{"qkv_layout": "head_interleaved"}, {"adaln_curve_grid": "1025"}]
)
def test_interleaved_qkv_is_refused_when_the_metadata_shows_it(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    path = edited(tiny(tmp_path, "dit", "pruned_bf16"), metadata=metadata)
    with pytest.raises(CheckpointError, match="interleaved per head"):
        open_checkpoint(path, "dit")


def test_a_wangp_int8_file_is_grouped_and_accepted(int8: Path) -> None:
    path = edited(int8, metadata={"adaln_curve_grid": "1025"})
    assert open_checkpoint(path, "dit").quantised


def test_a_file_of_another_role_says_what_it_is(nvfp4: Path) -> None:
    said = "is not a Qwen3-VL text encoder: it holds a MiniMax H3 DiT"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(nvfp4, "text_encoder")


def test_a_diffusers_file_is_refused_by_its_layout(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = {"transformer_blocks.0.attn.to_q.weight": entry}
    path = raw_file(tmp_path / "d.safetensors", header, b"1234")
    with pytest.raises(CheckpointError, match="diffusers-layout transformer"):
        open_checkpoint(path, "dit")


def test_an_unknown_role_is_refused(nvfp4: Path) -> None:
    with pytest.raises(ValueError, match="role must be one of dit, text_encoder"):
        open_checkpoint(nvfp4, "unet")
