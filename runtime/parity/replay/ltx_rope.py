"""Replay of LTX rotation tables at real sizes: positions, sampled rows, sums over whole tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from runtime.ltx.config import LTXConfig
from runtime.ltx.packing import (
    RopeTables,
    Rotation,
    Seconds,
    audio_positions,
    frequencies,
    rope_tables,
    video_positions,
)
from runtime.ltx.published import CONFIG, metadata_of
from runtime.parity.golden import Golden
from runtime.parity.ltx_files import fps_of, shape_of
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup

_TABLES = {
    "video_self": "video",
    "audio_self": "audio",
    "cross_video": "video_cross",
    "cross_audio": "audio_cross",
}
_CHECK_PERIOD = 97  # of the weights in the sums over a whole table


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """No weights needed; the tables are made on the CPU whatever the device."""
    del checkpoints, setup
    return [*_positions(golden), *_model_tables(golden), *_comfy_rows(golden)]


def _config(golden: Golden) -> LTXConfig:
    """The published one, with the golden's widths."""
    params = golden.params
    heads = params["heads"]
    table = {
        **CONFIG,
        "num_attention_heads": heads,
        "audio_num_attention_heads": heads,
        "connector_num_attention_heads": heads,
        "audio_connector_num_attention_heads": heads,
    }
    for lead, inner in (("", params["video_inner"]), ("audio_", params["audio_inner"])):
        if inner % heads:
            raise Unsupported(f"{heads} heads over {inner}")
        table[f"{lead}attention_head_dim"] = inner // heads
        table[f"{lead}connector_attention_head_dim"] = inner // heads
        table[f"{lead}cross_attention_dim"] = inner
    return LTXConfig.from_header(metadata_of(table))


def _tables(golden: Golden, seconds: Seconds) -> RopeTables:
    return rope_tables(_config(golden), shape_of(golden), fps_of(golden), seconds=seconds)


def _positions(golden: Golden) -> Iterator[Comparison]:
    shape = shape_of(golden)
    names = ("axis0_seconds", "axis1_pixels", "axis2_pixels")
    found = dict(zip(names, video_positions(shape, fps_of(golden)), strict=True))
    found["audio"] = audio_positions(shape.audio)[None]
    for name, value in found.items():
        yield from _compare(golden, f"positions.{name}", value, "positions")


def _model_tables(golden: Golden) -> Iterator[Comparison]:
    config = _config(golden)
    tables = _tables(golden, "divide")
    widths = {"video_self": (config.video_dim, 3), "audio_self": (config.audio_dim, 1)}
    for name, ours in _TABLES.items():
        inner, axes = widths.get(name, (config.audio_cross_attention_dim, 1))
        found = frequencies(inner // (2 * axes), config.positional_embedding_theta)
        yield from _compare(golden, f"{name}.freqs_f32", found, "frequencies")
        for part, table_HTr in _parts(getattr(tables, ours)):
            yield from _compare(golden, f"{name}.{part}", _rows(golden, name, table_HTr), "rope")
            yield from _compare(golden, f"{name}.check_{part}", _sums(table_HTr), "rope")


def _comfy_rows(golden: Golden) -> Iterator[Comparison]:
    """Stored where the multiplication by 1/fps moves a row."""
    tables = _tables(golden, "multiply")
    for name, ours in _TABLES.items():
        for part, table_HTr in _parts(getattr(tables, ours)):
            rows = _rows(golden, name, table_HTr)
            yield from _compare(golden, f"{name}.comfy_{part}", rows, "rope")


def _parts(rotation: Rotation) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    return ("cos", rotation.cos_BHTr[0]), ("sin", rotation.sin_BHTr[0])


def _rows(golden: Golden, name: str, table_HTr: Tensor) -> Tensor:
    return table_HTr[:, golden.tensor(f"{name}.tokens")]


def _sums(table_HTr: Tensor) -> Tensor:
    """Per head, over the whole table, in float64: each token with a weight of its own."""
    weight_T = torch.arange(table_HTr.shape[1], dtype=torch.float64) % _CHECK_PERIOD + 1
    return (table_HTr.double() * weight_T[:, None]).sum(dim=(1, 2))


def _compare(golden: Golden, name: str, got: Tensor, stage: str) -> Iterator[Comparison]:
    if name in golden:
        yield compare(name, got, golden.tensor(name), run="free", stage=stage)
