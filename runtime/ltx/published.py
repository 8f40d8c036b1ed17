"""The published LTX-2.5 denoiser file as data, and a tiny twin: every tensor (ltx25.md 1.2 to 1.4).

Free of torch. The lists come from a config, so that the census of a file asks for what its own
header promises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.checkpoints.header import RANDOM_WEIGHTS
from runtime.checkpoints.layer import round_up
from runtime.checkpoints.layouts import NVFP4, Layout, TensorSpec, layout
from runtime.ltx.config import (
    ADALN_HEADS,
    AV_ROWS,
    BLOCK_ROWS,
    FREQUENCIES,
    PROMPT_ROWS,
    LTXConfig,
)

PREFIX = "model.diffusion_model."
KEYFRAMES = "keyframes_abs_pos_embedding"
CONNECTORS = ("video_embeddings_connector", "audio_embeddings_connector")
PACKED_BLOCKS = 42  # of the published 48: 0 to 41
MODEL_VERSION = "2.5.0"
GEMMA_SOURCE = '{"ltx_version": "2.5.0", "gemma_version": "gemma4-12b-ltx-v1"}'
# The form: with markers and keyframes | first release, without both | unquantised
FORMATS = ("nvfp4", "nvfp4_bare", "bf16")

CONFIG: Mapping[str, Any] = {
    "_class_name": "AVTransformer3DModel",
    "num_layers": 48,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "cross_attention_dim": 4096,
    "in_channels": 128,
    "out_channels": 128,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "audio_out_channels": 128,
    "caption_channels": 3840,
    "norm_eps": 1e-06,
    "qk_norm": "rms_norm",
    "standardization_norm": "rms_norm",
    "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20],
    "rope_type": "split",
    "frequencies_precision": "float64",
    "use_middle_indices_grid": True,
    "causal_temporal_positioning": True,
    "timestep_scale_multiplier": 1000,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "cross_attention_adaln": True,
    "apply_gated_attention": True,
    "ff_bias": False,
    "audio_ff_bias": True,
    "use_prompt_adaln_single": True,
    "use_keyframes_abs_pos_embedding": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "caption_proj_input_norm": False,
    "text_encoder_norm_type": "per_token_rms",
    "connector_num_attention_heads": 32,
    "connector_attention_head_dim": 128,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "connector_num_layers": 8,
    "connector_num_learnable_registers": 128,
    "connector_positional_embedding_max_pos": [4096],
    "connector_apply_gated_attention": True,
    "connector_norm_output": True,
}
# One block stays bf16, as in the published file; the rope of video is padded by two zeros there too
TINY_CONFIG: Mapping[str, Any] = {
    **CONFIG,
    "num_layers": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 32,
    "caption_channels": 32,
    "connector_num_attention_heads": 4,
    "connector_attention_head_dim": 16,
    "audio_connector_num_attention_heads": 4,
    "audio_connector_attention_head_dim": 8,
    "connector_num_layers": 2,
}
TINY_PACKED_BLOCKS = 2


def metadata_of(table: Mapping[str, Any]) -> dict[str, str]:
    """The header's `__metadata__` of a random file with this config.transformer."""
    return {
        "config": json.dumps({"transformer": dict(table)}),
        "model_version": MODEL_VERSION,
        "gemma_source_checkpoint": GEMMA_SOURCE,
        "license": RANDOM_WEIGHTS,
    }


def denoiser(config: LTXConfig, *, keyframes: bool) -> Iterator[TensorSpec]:
    """All tensors of the two-stream denoiser, unquantised, without prefix (ltx25.md 1.3)."""
    video, audio = config.video_dim, config.audio_dim
    yield from _linear("patchify_proj", video, config.in_channels)
    yield from _linear("audio_patchify_proj", audio, config.audio_in_channels)
    yield from _linear("proj_out", config.out_channels, video)
    yield from _linear("audio_proj_out", config.audio_out_channels, audio)
    yield _table("scale_shift_table", 2, video)
    yield _table("audio_scale_shift_table", 2, audio)
    if keyframes:
        yield TensorSpec(name=KEYFRAMES, dtype="BF16", shape=(1, video))
    for name, (of_audio, rows) in ADALN_HEADS.items():
        width = config.stream_dim(of_audio)
        yield from _linear(f"{name}.emb.timestep_embedder.linear_1", width, FREQUENCIES)
        yield from _linear(f"{name}.emb.timestep_embedder.linear_2", width, width)
        yield from _linear(f"{name}.linear", rows * width, width)
    for n in range(config.num_layers):
        yield from _block(f"transformer_blocks.{n}", config)


def connectors(config: LTXConfig) -> Iterator[TensorSpec]:
    """The two connectors of the text conditioning, which the same file carries."""
    for of_audio, name in enumerate(CONNECTORS):
        heads, _ = config.connector_heads(bool(of_audio))
        d = config.connector_dim(bool(of_audio))
        registers = (config.connector_num_learnable_registers, d)
        yield TensorSpec(name=f"{name}.learnable_registers", dtype="BF16", shape=registers)
        for n in range(config.connector_num_layers):
            block = f"{name}.transformer_1d_blocks.{n}"
            yield from _attention(f"{block}.attn1", d, d, d, heads)
            yield from _feed_forward(f"{block}.ff", d, bias=True)


def _block(name: str, config: LTXConfig) -> Iterator[TensorSpec]:
    v, a = config.video_dim, config.audio_dim
    video_heads, audio_heads = config.num_attention_heads, config.audio_num_attention_heads
    yield from _attention(f"{name}.attn1", v, v, v, video_heads)
    yield from _attention(f"{name}.attn2", v, v, config.cross_attention_dim, video_heads)
    yield from _attention(f"{name}.audio_attn1", a, a, a, audio_heads)
    audio_text = config.audio_cross_attention_dim
    yield from _attention(f"{name}.audio_attn2", a, a, audio_text, audio_heads)
    yield from _attention(f"{name}.audio_to_video_attn", v, a, a, audio_heads)
    yield from _attention(f"{name}.video_to_audio_attn", a, a, v, audio_heads)
    yield from _feed_forward(f"{name}.ff", v, bias=config.ff_bias)
    yield from _feed_forward(f"{name}.audio_ff", a, bias=config.audio_ff_bias)
    yield _table(f"{name}.scale_shift_table", BLOCK_ROWS, v)
    yield _table(f"{name}.audio_scale_shift_table", BLOCK_ROWS, a)
    yield _table(f"{name}.prompt_scale_shift_table", PROMPT_ROWS, v)
    yield _table(f"{name}.audio_prompt_scale_shift_table", PROMPT_ROWS, a)
    yield _table(f"{name}.scale_shift_table_a2v_ca_video", AV_ROWS, v)
    yield _table(f"{name}.scale_shift_table_a2v_ca_audio", AV_ROWS, a)


def _attention(name: str, query: int, inner: int, context: int, heads: int) -> Iterator[TensorSpec]:
    yield from _linear(f"{name}.to_q", inner, query)
    yield from _linear(f"{name}.to_k", inner, context)
    yield from _linear(f"{name}.to_v", inner, context)
    yield from _linear(f"{name}.to_out.0", query, inner)
    yield TensorSpec(name=f"{name}.q_norm.weight", dtype="BF16", shape=(inner,))
    yield TensorSpec(name=f"{name}.k_norm.weight", dtype="BF16", shape=(inner,))
    yield from _linear(f"{name}.to_gate_logits", heads, query)


def _feed_forward(name: str, width: int, *, bias: bool) -> Iterator[TensorSpec]:
    yield from _linear(f"{name}.net.0.proj", 4 * width, width, bias=bias)
    yield from _linear(f"{name}.net.2", width, 4 * width, bias=bias)


def _linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Iterator[TensorSpec]:
    yield TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(rows, columns))
    if bias:
        yield TensorSpec(name=f"{name}.bias", dtype="BF16", shape=(rows,))


def _table(name: str, rows: int, width: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="F32", shape=(rows, width))


def packable(name: str) -> bool:
    """Is it one of the 28 linears of a block that the published file quantises (no gates)?"""
    if not name.startswith("transformer_blocks."):
        return False
    return name.endswith((".to_q", ".to_k", ".to_v", ".to_out.0", ".net.0.proj", ".net.2"))


def quantised(specs: Iterator[TensorSpec], blocks: int) -> Iterator[TensorSpec]:
    """The linears of the first `blocks` blocks as NVFP4 with a static input scale."""
    for spec in specs:
        layer, _, suffix = spec.name.rpartition(".")
        if suffix != "weight" or not packable(layer) or int(layer.split(".")[1]) >= blocks:
            yield spec
            continue
        rows, columns = spec.shape
        stored: dict[str, tuple[str, tuple[int, ...]]] = {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (round_up(rows, 128), round_up(columns // 16, 4))),
            "weight_scale_2": ("F32", ()),
            "input_scale": ("F32", ()),
        }
        for suffix, (dtype, shape) in stored.items():
            name = f"{layer}.{suffix}"
            yield TensorSpec(name=name, dtype=dtype, shape=shape, rows=rows, columns=columns)


def published(size: str, format: str) -> Layout:
    """The layout of one denoiser file. size: full | tiny; format: one of FORMATS.

    ValueError for another word.
    """
    if size not in ("full", "tiny"):
        raise ValueError(f"size must be full or tiny, got {size!r}")
    if format not in FORMATS:
        raise ValueError(f"an LTX denoiser comes as {', '.join(FORMATS)}, got {format!r}")
    full = size == "full"
    table = CONFIG if full else TINY_CONFIG
    metadata = metadata_of(table)
    config = LTXConfig.from_header(metadata)
    specs = denoiser(config, keyframes=format != "nvfp4_bare")
    if format != "bf16":
        specs = quantised(specs, PACKED_BLOCKS if full else TINY_PACKED_BLOCKS)
    tensors = [_prefixed(spec) for spec in (*specs, *connectors(config))]
    if format == "nvfp4":
        layers = [spec.name.rpartition(".")[0] for spec in tensors if spec.dtype == "U8"]
        marked = dict.fromkeys(layers, json.loads(NVFP4))
        text = json.dumps({"format_version": "1.0", "layers": marked})
        metadata["_quantization_metadata"] = text
    return layout(tensors, metadata)


def _prefixed(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(
        name=PREFIX + spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        rows=spec.rows,
        columns=spec.columns,
    )
