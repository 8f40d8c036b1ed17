"""Small LTX denoiser files for tests: one set of weights, unquantised or as NVFP4 in any form."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import comfy_kitchen as ck
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.ltx.config import LTXConfig
from runtime.ltx.published import (
    PREFIX,
    TINY_CONFIG,
    connectors,
    denoiser,
    metadata_of,
    packable,
)

# Every width fills the 128x4 tiles of the scales, as in the published file: shapes show no order.
TABLE: Mapping[str, Any] = {
    **TINY_CONFIG,
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "cross_attention_dim": 128,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 128,
    "connector_attention_head_dim": 32,
    "audio_connector_attention_head_dim": 32,
    "connector_num_layers": 1,
}
_MARKER = {"format": "nvfp4"}
Edit = Callable[[dict[str, Tensor], dict[str, str]], None]


def config(**changes: Any) -> LTXConfig:
    return LTXConfig.from_header(metadata_of({**TABLE, **changes}))


def weights(
    seed: int = 0, *, keyframes: bool = True, with_connectors: bool = True
) -> dict[str, Tensor]:
    """All tensors by name without prefix; 16-blocks of linears differ in size (log-normal)."""
    found = {}
    specs = [*denoiser(config(), keyframes=keyframes)]
    specs += connectors(config()) if with_connectors else ()
    for spec in specs:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
        value = torch.randn(spec.shape, generator=generator)
        if spec.name.endswith("norm.weight"):
            value = 1 + 0.1 * value
        elif len(spec.shape) == 2 and spec.shape[1] % 16 == 0:
            blocks = value.view(spec.shape[0], -1, 16)
            uneven = torch.randn(blocks.shape[:2], generator=generator).exp()
            value = (blocks * uneven[..., None]).view(spec.shape) / math.sqrt(spec.shape[1])
        found[spec.name] = value.to(torch.float32 if spec.dtype == "F32" else torch.bfloat16)
    return found


def write_bf16(path: Path, edit: Edit | None = None, seed: int = 0, **options: bool) -> Path:
    return _save(path, weights(seed, **options), metadata_of(TABLE), edit)


def write_nvfp4(
    path: Path,
    edit: Edit | None = None,
    *,
    markers: str = "header",
    order: str = "high_tiled",
    blocks: int = 1,
    seed: int = 0,
    **options: bool,
) -> Path:
    """The first `blocks` blocks packed. markers: none | header | bare (names) | tensors."""
    tensors, metadata = weights(seed, **options), metadata_of(TABLE)
    layers = [
        name.removesuffix(".weight")
        for name in tensors
        if packable(name.removesuffix(".weight")) and name.endswith(".weight")
        if int(name.split(".")[1]) < blocks
    ]
    for layer in layers:
        for suffix, tensor in packed(tensors.pop(f"{layer}.weight"), order).items():
            tensors[f"{layer}.{suffix}"] = tensor
        if markers == "tensors":
            tensors[f"{layer}.comfy_quant"] = marker()
    if markers in ("header", "bare"):
        prefix = PREFIX if markers == "header" else ""
        said = {f"{prefix}{layer}": _MARKER for layer in layers}
        metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": said})
    return _save(path, tensors, metadata, edit)


def marker(format: str = "nvfp4") -> Tensor:
    return torch.tensor(list(json.dumps({"format": format}).encode()), dtype=torch.uint8)


def packed(weight_NK: Tensor, order: str = "high_tiled") -> dict[str, Tensor]:
    """One layer as stored. The order is undone element by element, by the contract's formula."""
    second = weight_NK.float().abs().max() / 2688
    codes, scales = ck.quantize_nvfp4(weight_NK.float(), second)
    if order.startswith("low"):
        codes = codes % 16 * 16 + codes // 16
    if order.endswith("linear"):
        scales = untiled(scales)
    return {
        "weight": codes.contiguous(),
        "weight_scale": scales.contiguous(),
        "weight_scale_2": second,
        "input_scale": torch.tensor(6.0 / 2688),
    }


def untiled(scales: Tensor) -> Tensor:
    """Row by row: scale (r, c) lies at the byte that ltx25.md 1.4 gives for it."""
    rows, columns = scales.shape
    flat = scales.reshape(-1).view(torch.uint8)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = (r // 128) * (columns // 4) + c // 4
    at = tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return flat[at].view(scales.dtype)


def _save(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], edit: Edit | None
) -> Path:
    if edit is not None:
        edit(tensors, metadata)
    renamed = {PREFIX + name: tensor for name, tensor in tensors.items()}
    save_file(renamed, str(path), metadata=metadata)
    return path
