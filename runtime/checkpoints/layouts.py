"""Published key layouts as data: name, dtype and shape of every tensor, for any dims (no torch)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from runtime.checkpoints.header import BITS
from runtime.checkpoints.layer import round_up

NVFP4 = '{"format": "nvfp4"}'
NVFP4_FULL_PRECISION = '{"format": "nvfp4", "full_precision_matrix_mult": true}'
FP8 = '{"format": "float8_e4m3fn"}'
INT8 = '{"format": "int8_tensorwise"}'
_FILE_ORDER = (
    *("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a layout; `marker` is the JSON text when this is a `.comfy_quant` tensor.

    `columns`: K of the layer that a packed weight or a scale belongs to, 0 elsewhere.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    marker: str = ""
    rows: int = 0
    columns: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DitDims:
    """Widths and counts of a DiT (contract 1.1)."""

    hidden: int = 5376
    heads: int = 56
    head_dim: int = 128
    ffn: int = 14336
    blocks: int = 50
    refiner_blocks: int = 2
    text_dim: int = 5120
    video_row: int = 96
    audio_row: int = 32
    inv_freq: int = 16
    time_in: int = 256
    time_hidden: int = 5376
    time_dim: int = 2688
    grid: int = 1025
    rank: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDims:
    """Widths and counts of the text encoder (contract 5.1)."""

    hidden: int = 5120
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 25600
    layers: int = 50
    vocabulary: int = 151936
    vision_hidden: int = 1152
    vision_ffn: int = 4304
    vision_blocks: int = 27
    positions: int = 2304
    taps: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoVaeDims:
    """Widths and counts of the video VAE (contract 6.2)."""

    channels: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    width: int = 2048
    ffn: int = 8192
    blocks: int = 36
    latents: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioVaeDims:
    """Widths of the audio VAE (contract 7)."""

    encoder: int = 64
    width: int = 2048
    decoder: int = 1024
    latents: int = 32


TINY_DIT = DitDims(
    hidden=128,
    heads=4,
    ffn=384,
    blocks=3,
    text_dim=16,
    time_hidden=96,
    time_dim=48,
    grid=129,
)
TINY_TEXT = TextDims(
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=48,
    vision_hidden=64,
    vision_ffn=96,
    vision_blocks=4,
)
TINY_VIDEO_VAE = VideoVaeDims(channels=(32, 32, 32, 32, 64, 64), width=128, ffn=512, blocks=3)
TINY_AUDIO_VAE = AudioVaeDims(encoder=4, width=512, decoder=128)


def dit(dims: DitDims, *, pruned: bool, adaln: str = "BF16") -> Iterator[TensorSpec]:
    """Unquantised DiT (contract 1.3); adaln: dtype of the AdaLN linears."""
    d, time = dims.hidden, dims.rank if pruned else dims.time_dim
    yield from _linear("video_patch_proj", d, dims.video_row, "F32")
    yield from _linear("audio_patch_proj", d, dims.audio_row, "F32")
    yield from _linear("condition_proj", d, dims.text_dim, "BF16")
    yield TensorSpec(name="rope.inv_freq", dtype="F32", shape=(dims.inv_freq,))
    if pruned:
        yield TensorSpec(name="adaln_t_table", dtype="F32", shape=(dims.grid, dims.rank))
    else:
        yield from _linear("time_embedder.proj_in", dims.time_hidden, dims.time_in, "F32")
        yield from _linear("time_embedder.proj_out", dims.time_dim, dims.time_hidden, "F32")
    for n in range(dims.refiner_blocks):
        yield from _dit_block(f"token_refiner.blocks.{n}", dims)
    yield _vector("token_refiner.final_norm.weight", d, "BF16")
    for n in range(dims.blocks):
        yield from _dit_block(f"blocks.{n}", dims)
        yield from _linear(f"blocks.{n}.adaln_proj.linear", 18 * d, time, adaln)
    yield _vector("final_layer.norm.weight", d, "BF16")
    yield from _linear("final_layer.adaln_proj.linear", 2 * d, time, adaln)
    yield from _linear("final_layer.video_out", dims.video_row, d, "F32")
    yield from _linear("final_layer.audio_out", dims.audio_row, d, "F32")


def _dit_block(name: str, dims: DitDims) -> Iterator[TensorSpec]:
    d, inner = dims.hidden, dims.heads * dims.head_dim
    yield _vector(f"{name}.norm1.weight", d, "BF16")
    yield _vector(f"{name}.norm2.weight", d, "BF16")
    yield _vector(f"{name}.attn.q_norm.weight", dims.head_dim, "BF16")
    yield _vector(f"{name}.attn.k_norm.weight", dims.head_dim, "BF16")
    yield _matrix(f"{name}.attn.qkv_proj.weight", 3 * inner, d, "BF16")
    yield _matrix(f"{name}.attn.out_proj.weight", d, inner, "BF16")
    yield _matrix(f"{name}.mlp.fc1.weight", 2 * dims.ffn, d, "BF16")
    yield _matrix(f"{name}.mlp.fc2.weight", d, dims.ffn, "BF16")


def text_encoder(dims: TextDims) -> Iterator[TensorSpec]:
    """Unquantised Qwen3-VL text encoder with its vision tower (contract 5.1)."""
    d, inner, kv = dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    yield _matrix("model.embed_tokens.weight", dims.vocabulary, d, "BF16")
    for n in range(dims.layers):
        layer = f"model.layers.{n}"
        yield _vector(f"{layer}.input_layernorm.weight", d, "BF16")
        yield _vector(f"{layer}.post_attention_layernorm.weight", d, "BF16")
        yield _vector(f"{layer}.self_attn.q_norm.weight", dims.head_dim, "BF16")
        yield _vector(f"{layer}.self_attn.k_norm.weight", dims.head_dim, "BF16")
        yield _matrix(f"{layer}.self_attn.q_proj.weight", inner, d, "BF16")
        yield _matrix(f"{layer}.self_attn.k_proj.weight", kv, d, "BF16")
        yield _matrix(f"{layer}.self_attn.v_proj.weight", kv, d, "BF16")
        yield _matrix(f"{layer}.self_attn.o_proj.weight", d, inner, "BF16")
        yield _matrix(f"{layer}.mlp.gate_proj.weight", dims.ffn, d, "BF16")
        yield _matrix(f"{layer}.mlp.up_proj.weight", dims.ffn, d, "BF16")
        yield _matrix(f"{layer}.mlp.down_proj.weight", d, dims.ffn, "BF16")
    yield from _vision(dims)


def _vision(dims: TextDims) -> Iterator[TensorSpec]:
    v, merged = dims.vision_hidden, 4 * dims.vision_hidden
    yield from _conv("visual.patch_embed.proj", (v, 3, 2, 16, 16), "BF16")
    yield _matrix("visual.pos_embed.weight", dims.positions, v, "BF16")
    for n in range(dims.vision_blocks):
        block = f"visual.blocks.{n}"
        yield from _norm(f"{block}.norm1", v, "BF16")
        yield from _norm(f"{block}.norm2", v, "BF16")
        yield from _linear(f"{block}.attn.qkv", 3 * v, v, "BF16")
        yield from _linear(f"{block}.attn.proj", v, v, "BF16")
        yield from _linear(f"{block}.mlp.linear_fc1", dims.vision_ffn, v, "BF16")
        yield from _linear(f"{block}.mlp.linear_fc2", v, dims.vision_ffn, "BF16")
    mergers = [("visual.merger", v)]
    mergers += [(f"visual.deepstack_merger_list.{n}", merged) for n in range(dims.taps)]
    for name, norm in mergers:
        yield from _norm(f"{name}.norm", norm, "BF16")
        yield from _linear(f"{name}.linear_fc1", merged, merged, "BF16")
        yield from _linear(f"{name}.linear_fc2", dims.hidden, merged, "BF16")


def video_vae(dims: VideoVaeDims) -> Iterator[TensorSpec]:
    """Video VAE in fp16 (contract 6.2)."""
    z = dims.latents
    yield _vector("latents_mean", z, "F32")
    yield _vector("latents_std", z, "F32")
    yield from _conv("quant_conv", (2 * z, 2 * z, 1, 1, 1), "F16")
    yield from _conv("post_quant_conv", (z, z, 1, 1, 1), "F16")
    yield from _conv("encoder.conv_in", (dims.channels[0], 3, 3, 3, 3), "F16")
    previous = dims.channels[0]
    for level, width in enumerate(dims.channels):
        for block in range(2):
            name = f"encoder.down.{level}.block.{block}"
            yield from _norm(f"{name}.norm1", previous, "F16")
            yield from _norm(f"{name}.norm2", width, "F16")
            yield from _conv(f"{name}.conv1", (width, previous, 3, 3, 3), "F16")
            yield from _conv(f"{name}.conv2", (width, width, 3, 3, 3), "F16")
            if previous != width:
                yield from _conv(f"{name}.nin_shortcut", (width, previous, 1, 1, 1), "F16")
            previous = width
        if level < 4:
            down = (width, width, 3, 3, 3)
            yield from _conv(f"encoder.down.{level}.downsample.conv", down, "F16")
    yield from _norm("encoder.norm_out", previous, "F16")
    yield from _conv("encoder.conv_out", (2 * z, previous, 3, 3, 3), "F16")
    yield from _video_decoder(dims)


def _video_decoder(dims: VideoVaeDims) -> Iterator[TensorSpec]:
    w = dims.width
    yield from _linear("decoder.x_embedder", w, dims.latents, "F16")
    yield TensorSpec(name="decoder.register_tokens", dtype="F16", shape=(1, 4, w))
    yield TensorSpec(name="decoder.mask_token", dtype="F16", shape=(1, 1, w))
    for n in range(dims.blocks):
        block = f"decoder.transformer_blocks.{n}"
        for vector in ("norm1.weight", "norm2.weight", "scale1", "scale2"):
            yield _vector(f"{block}.{vector}", w, "F16")
        yield from _linear(f"{block}.attn.to_qkv", 3 * w, w, "F16")
        yield from _linear(f"{block}.attn.to_out", w, w, "F16")
        yield from _linear(f"{block}.ff.w1", 2 * dims.ffn, w, "F16")
        yield from _linear(f"{block}.ff.w2", w, dims.ffn, "F16")
    yield from _norm("decoder.norm_out", w, "F16")
    yield from _linear("decoder.proj_out", 3 * 4 * 16 * 16, w, "F16")


def audio_vae(dims: AudioVaeDims) -> Iterator[TensorSpec]:
    """Audio VAE in fp32 (contract 7)."""
    z, w = dims.latents, dims.width
    yield _vector("latents_mean", z, "F32")
    yield _vector("latents_std", z, "F32")
    yield from _audio_encoder(dims)
    attn, mlp = "pre_block.attn", "pre_block.mlp"
    yield _matrix(f"{attn}.qkv.weight", 3 * w, w, "F32")
    for bias in ("q_bias", "v_bias", "zero_k_bias"):
        yield _vector(f"{attn}.{bias}", w, "F32")
    yield from _linear(f"{attn}.proj", z, z, "F32")
    yield from _norm("pre_block.norm1", w, "F32")
    yield from _norm("pre_block.norm2", z, "F32")
    yield from _norm("pre_block.norm3", w, "F32")
    yield from _linear("pre_block.proj", z, w, "F32")
    yield from _norm(f"{mlp}.norm", z, "F32")
    yield from _linear(f"{mlp}.w0", 2 * z, z, "F32")
    yield from _linear(f"{mlp}.w1", 2 * z, z, "F32")
    yield from _linear(f"{mlp}.w2", z, 2 * z, "F32")
    yield from _conv("mean_proj", (z, z, 1), "F32")
    yield from _conv("logs_proj", (z, z, 1), "F32")
    yield from _conv("dec_in_proj", (w, z, 1), "F32")
    yield from _audio_decoder(dims)


def _audio_encoder(dims: AudioVaeDims) -> Iterator[TensorSpec]:
    c = dims.encoder
    yield from _conv("encoder.block.0", (c, 1, 7), "F32")
    for stage, stride in enumerate((2, 4, 4, 5, 5), start=1):
        name = f"encoder.block.{stage}.block"
        for unit in range(3):
            inner = f"{name}.{unit}.block"
            yield TensorSpec(name=f"{inner}.0.alpha", dtype="F32", shape=(1, c, 1))
            yield from _conv(f"{inner}.1", (c, c, 7), "F32")
            yield TensorSpec(name=f"{inner}.2.alpha", dtype="F32", shape=(1, c, 1))
            yield from _conv(f"{inner}.3", (c, c, 1), "F32")
        yield TensorSpec(name=f"{name}.3.alpha", dtype="F32", shape=(1, c, 1))
        yield from _conv(f"{name}.4", (2 * c, c, 2 * stride), "F32")
        c *= 2
    yield TensorSpec(name="encoder.block.6.alpha", dtype="F32", shape=(1, c, 1))
    yield from _conv("encoder.block.7", (dims.width, c, 3), "F32")


def _audio_decoder(dims: AudioVaeDims) -> Iterator[TensorSpec]:
    c = dims.decoder
    yield from _conv("decoder.conv_pre", (c, dims.width, 7), "F32")
    for stage, kernel in enumerate((9, 9, 4, 4, 4, 4, 4)):
        yield TensorSpec(
            name=f"decoder.ups.{stage}.0.weight", dtype="F32", shape=(c, c // 2, kernel)
        )
        c //= 2
        yield _vector(f"decoder.ups.{stage}.0.bias", c, "F32")
        for branch, size in enumerate((3, 7, 11)):
            block = f"decoder.resblocks.{3 * stage + branch}"
            for n in range(3):
                yield from _conv(f"{block}.convs1.{n}", (c, c, size), "F32")
                yield from _conv(f"{block}.convs2.{n}", (c, c, size), "F32")
            for n in range(6):
                yield from _activation(f"{block}.activations.{n}", c)
    yield from _activation("decoder.activation_post", c)
    yield TensorSpec(name="decoder.conv_post.weight", dtype="F32", shape=(1, c, 7))


def _activation(name: str, channels: int) -> Iterator[TensorSpec]:
    yield _vector(f"{name}.act.alpha", channels, "F32")
    yield _vector(f"{name}.act.beta", channels, "F32")
    yield TensorSpec(name=f"{name}.upsample.filter", dtype="F32", shape=(1, 1, 12))
    yield TensorSpec(name=f"{name}.downsample.lowpass.filter", dtype="F32", shape=(1, 1, 12))


def _vector(name: str, size: int, dtype: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(size,))


def _matrix(name: str, rows: int, columns: int, dtype: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(rows, columns))


def _conv(name: str, shape: tuple[int, ...], dtype: str) -> Iterator[TensorSpec]:
    yield TensorSpec(name=f"{name}.weight", dtype=dtype, shape=shape)
    yield _vector(f"{name}.bias", shape[0], dtype)


def _linear(name: str, rows: int, columns: int, dtype: str) -> Iterator[TensorSpec]:
    yield from _conv(name, (rows, columns), dtype)


def _norm(name: str, size: int, dtype: str) -> Iterator[TensorSpec]:
    yield _vector(f"{name}.weight", size, dtype)
    yield _vector(f"{name}.bias", size, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one layer is quantised: its marker and what else it stores."""

    marker: str
    pre_quant_scale: bool = False
    in_header: bool = False  # the file's `_quantization_metadata` holds the marker


Choose = Callable[[str, tuple[int, ...]], Recipe | None]


def quantised(specs: Iterable[TensorSpec], choose: Choose) -> Iterator[TensorSpec]:
    """Replace the weight of every layer for which choose(layer, [N, K]) gives a recipe."""
    for spec in specs:
        layer, _, suffix = spec.name.rpartition(".")
        recipe = choose(layer, spec.shape) if suffix == "weight" and len(spec.shape) == 2 else None
        if recipe is None:
            yield spec
        else:
            yield from _quantised_layer(layer, spec.shape, recipe)


def _quantised_layer(layer: str, shape: tuple[int, ...], recipe: Recipe) -> Iterator[TensorSpec]:
    rows, columns = shape
    name: str = json.loads(recipe.marker)["format"]
    scales: dict[str, tuple[str, tuple[int, ...]]]
    if name == "nvfp4":
        blocks = (round_up(rows, 128), round_up(columns // 16, 4))
        scales = {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", blocks),
            "weight_scale_2": ("F32", ()),
        }
    elif name == "int8_tensorwise":
        scales = {"weight": ("I8", (rows, columns)), "weight_scale": ("F32", (rows, 1))}
    else:
        scales = {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", ())}
    if recipe.pre_quant_scale:
        scales["pre_quant_scale"] = ("BF16", (columns,))
    for suffix, (dtype, stored) in scales.items():
        yield TensorSpec(
            name=f"{layer}.{suffix}", dtype=dtype, shape=stored, rows=rows, columns=columns
        )
    if not recipe.in_header:
        yield TensorSpec(
            name=f"{layer}.comfy_quant",
            dtype="U8",
            shape=(len(recipe.marker),),
            marker=recipe.marker,
        )


def convrot(columns: int) -> str:
    """INT8 marker with the largest rotation group (256 in published files) that divides K."""
    group = next(size for size in (256, 64, 16, 4) if columns % size == 0)
    return f'{{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": {group}}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All tensors of one file in file order, and its metadata."""

    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str]

    @property
    def payload_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    def header(self) -> bytes:
        """Length word and JSON, as the safetensors library writes them."""
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        position = 0
        for spec in self.tensors:
            offsets = [position, position + spec.nbytes]
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": offsets,
            }
            position += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def layout(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> Layout:
    """Put tensors in file order: widest dtype first, then by name (safetensors' own order)."""
    rank = {dtype: place for place, dtype in enumerate(_FILE_ORDER)}
    ordered = sorted(specs, key=lambda spec: (rank[spec.dtype], spec.name))
    return Layout(tensors=tuple(ordered), metadata=metadata)
