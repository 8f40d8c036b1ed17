"""Replay of LTX's NVFP4 layers: weights dequantised from the checkpoint, and W4A4 linears."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from comfy_kitchen.float_utils import from_blocked
from torch import Tensor

from runtime.checkpoints.base import PackedWeight
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.nvfp4_native import quantise
from runtime.ltx.linears import in_published_order
from runtime.ltx.load import LTXCheckpoint
from runtime.parity.golden import Golden
from runtime.parity.ltx_files import open_named
from runtime.parity.metrics import Comparison, compare
from runtime.parity.setup import Setup

BLOCK = 16
DIGITS = 5  # of a stored correlation
# How the golden calls a reading of the bytes -> the order that it takes them for
_READINGS = {
    "right": "high_tiled",
    "low_nibble_first": "low_tiled",
    "linear_scales": "high_linear",
    "both_wrong": "low_linear",
}


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """All from the checkpoint's bytes; a linear's activations are given."""
    checkpoint = open_named(golden, checkpoints)
    run = _dequantised if golden.kind == "ltx_dequant" else _linears
    return list(run(golden, checkpoint, setup))


def _dequantised(golden: Golden, checkpoint: LTXCheckpoint, setup: Setup) -> Iterator[Comparison]:
    names = sorted(name for name in golden.names if name.startswith("dequant."))
    for name in names:
        layer = name.removeprefix("dequant.")
        packed = checkpoint.packed(layer, setup.device)
        weight_NK = dequantise(packed, torch.float32)
        yield _compare(golden, name, weight_NK, "weight")
        yield from _scales(golden, packed)
        yield from _correlations(golden, packed)
    if setup.staged:  # a digest has no tolerance for another processor's last bit
        yield from _digests(golden, checkpoint)


def _scales(golden: Golden, packed: PackedWeight) -> Iterator[Comparison]:
    name = f"scales_linear.{packed.layer}"
    if name in golden:
        rows, columns = packed.shape
        stored = packed.tensors["weight_scale"].view(torch.uint8)
        found = from_blocked(stored, rows, columns // BLOCK).view(torch.float8_e4m3fn)
        yield _compare(golden, name, found, "scales")


def _correlations(golden: Golden, packed: PackedWeight) -> Iterator[Comparison]:
    """Of four readings of the same bytes with the weight they were made from."""
    name = f"source.{packed.layer}"
    stored = golden.params.get("correlation_with_source", {}).get(packed.layer, {})
    if name not in golden:
        return
    source = golden.tensor(name).float().flatten()
    known = [reading for reading in _READINGS if reading in stored]
    found = []
    for reading in known:
        read = dequantise(in_published_order(packed, _READINGS[reading]), torch.float32)
        pair = torch.stack([read.cpu().flatten(), source])
        found.append(round(float(torch.corrcoef(pair)[0, 1]), DIGITS))
    if known:
        want = torch.tensor([stored[reading] for reading in known], dtype=torch.float64)
        got = torch.tensor(found, dtype=torch.float64)
        label = f"correlation with {name}: {', '.join(known)}"
        yield compare(label, got, want, run="free", stage="correlation")


def _digests(golden: Golden, checkpoint: LTXCheckpoint) -> Iterator[Comparison]:
    """sha256 of every quantised layer of the file."""
    for layer, want in golden.params.get("sha256_of_all_float32_dequants", {}).items():
        weight_NK = dequantise(checkpoint.packed(layer), torch.float32)
        digest = hashlib.sha256(weight_NK.contiguous().numpy().tobytes()).hexdigest()
        got = torch.tensor([int(digest == want)])
        name = f"sha256 of {layer}"
        yield compare(name, got, torch.tensor([1]), run="free", stage="weight digest")


def _linears(golden: Golden, checkpoint: LTXCheckpoint, setup: Setup) -> Iterator[Comparison]:
    for name in sorted(name for name in golden.names if name.endswith(".act_codes")):
        layer = name.removesuffix(".act_codes")
        packed = checkpoint.packed(layer, setup.device)
        x = golden.tensor(f"{layer}.x").to(setup.device)
        scale = packed.tensors["input_scale"].to(torch.float32)
        codes, blocks = quantise(x.flatten(0, -2), scale)
        yield _compare(golden, f"{layer}.tensor_scale_a", scale, "scales")
        yield _compare(golden, name, codes, "codes")
        tiled = blocks.view(torch.float8_e4m3fn)
        yield _compare(golden, f"{layer}.act_scales_tiled", tiled, "scales")
        y = linear_backend("nvfp4_native").build(packed)(x)
        yield _compare(golden, f"{layer}.y", y, "linear")


def _compare(golden: Golden, name: str, got: Tensor, stage: str) -> Comparison:
    return compare(name, got, golden.tensor(name), run="free", stage=stage)
