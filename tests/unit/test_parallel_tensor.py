"""Weights that do not divide evenly among ranks: by heads, and by whole tiles of packed scales."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from comfy_kitchen.float_utils import from_blocked, to_blocked
from torch import Tensor

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.h3.model import Block
from runtime.h3.parallelize import FFN_UNITS
from runtime.kernels.linear.dequant import dequantise
from runtime.parallel.mesh import ALONE, Mesh
from runtime.parallel.shares import head_shares, ranges, unit_shares
from runtime.parallel.tensor import inputs_of, outputs_of
from tests.denoiser_parts import demo_plan
from tests.rank_processes import on_ranks
from tests.unit.test_parallel_model import codes_of, relative, velocities
from tests.wide_denoiser import HEADS, Case, model_of, sampled

TILE = 128  # rows of a tile of swizzled scales; it is 64 input features wide
HEAD_DIM, FFN = 128, 14336  # the real model's
CASES = {
    "fp32": Case(),
    "nvfp4_dequant": Case(stored="nvfp4"),
    "fp8_dequant": Case(stored="fp8"),
}
NATIVE = Case(stored="nvfp4", fields={"nvfp4": "nvfp4_native"})
LIMIT = 1e-6  # relative L2 of a step's velocities: fp32 sums in as many parts as there are ranks
SHARES = {
    "TP6": ((10, 10, 9, 9, 9, 9), (256, 256, 128, 128, 128, 128)),
    "TP3": ((19, 19, 18), (384, 384, 256)),
    "TP2xU3": ((28, 28) * 3, (512, 512) * 3),
}


def nvfp4(rows: int, columns: int) -> PackedWeight:
    """Random codes; scales as a checkpoint has them, in tiles."""
    made = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=made)
    scales = torch.rand(rows, columns // 16, generator=made).add_(0.1).to(torch.float8_e4m3fn)
    blocked = to_blocked(scales.view(torch.uint8), flatten=False).view(torch.float8_e4m3fn)
    return PackedWeight(
        layer="blocks.0.x",
        quant=LayerQuant(format="nvfp4"),
        shape=(rows, columns),
        tensors={
            "weight": codes,
            "weight_scale": blocked,
            "weight_scale_2": torch.tensor(0.5),
        },
    )


def tiles(packed: PackedWeight) -> Tensor:
    """[tiles of rows, tiles of columns, 512] as they lie in memory."""
    rows, columns = packed.shape
    return packed.tensors["weight_scale"].view(torch.uint8).view(rows // TILE, columns // 64, 512)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_a_packed_weight_is_cut_between_tiles_of_its_scales(ranks: int) -> None:
    """qkv and out by heads, fc1 and fc2 by 128 features: the tiles' bytes stay, the parts join."""
    heads = [
        slice(s.start * HEAD_DIM, s.stop * HEAD_DIM) for s in ranges(head_shares(HEADS, ranks))
    ]
    granules = ranges(unit_shares(FFN, ranks, FFN_UNITS))
    for width, parts in ((HEADS * HEAD_DIM, heads), (FFN, granules)):
        assert all(part.start % TILE == part.stop % TILE == 0 for part in parts)
        by_output, by_input = nvfp4(width, 64), nvfp4(TILE, width)
        outputs = [outputs_of(by_output, [part]) for part in parts]
        inputs = [inputs_of(by_input, part) for part in parts]
        for part, out, into in zip(parts, outputs, inputs, strict=True):
            rows = slice(part.start // TILE, part.stop // TILE)
            assert torch.equal(tiles(out), tiles(by_output)[rows])
            columns = slice(part.start // 64, part.stop // 64)
            assert torch.equal(tiles(into), tiles(by_input)[:, columns])
        for whole, cut, dim in ((by_output, outputs, 0), (by_input, inputs, 1)):
            joined = torch.cat([dequantise(part, torch.float32) for part in cut], dim=dim)
            assert torch.equal(joined, dequantise(whole, torch.float32))


def test_qkv_is_cut_by_heads_in_each_of_its_thirds() -> None:
    inner = HEADS * HEAD_DIM
    whole = nvfp4(3 * inner, 64)
    own = ranges(head_shares(HEADS, 6))[2]  # the first of those with nine
    parts = [
        slice(third * inner + own.start * HEAD_DIM, third * inner + own.stop * HEAD_DIM)
        for third in range(3)
    ]
    cut = outputs_of(whole, parts)
    assert cut.shape == (3 * 9 * HEAD_DIM, 64)
    plain = from_blocked(whole.tensors["weight_scale"].view(torch.uint8), *whole.shape[:1], 4)
    got = from_blocked(cut.tensors["weight_scale"].view(torch.uint8), *cut.shape[:1], 4)
    assert torch.equal(got, torch.cat([plain[part] for part in parts]))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """On one rank: by case the velocities; heads, features of the MLP; NATIVE's first integers."""

    steps: dict[str, dict[str, Tensor]]
    heads: int
    ffn: int
    codes: list[tuple[Tensor, Tensor]]


def evaluated(mesh: Mesh, cases: dict[str, Case]) -> Seen:
    model = model_of(NATIVE, mesh)
    codes = codes_of(model)
    sampled(model, NATIVE)
    block = model.blocks[0]
    assert isinstance(block, Block)
    fc1 = block.get_submodule("mlp.fc1")
    assert isinstance(fc1.out_features, int)
    steps = {name: sampled(model_of(case, mesh), case) for name, case in cases.items()}
    return Seen(steps=steps, heads=block.attn.heads, ffn=fc1.out_features // 2, codes=codes[:2])


@functools.cache
def on_layout(layout: str) -> list[Seen]:
    """On all its ranks: one start of the processes for both tests of a layout."""
    return on_ranks(evaluated, layout, CASES)


@functools.cache
def one_process() -> Seen:
    return evaluated(ALONE, CASES)


@pytest.mark.parametrize("layout", SHARES)
def test_uneven_ranks_compute_what_one_process_does(layout: str) -> None:
    ranks, alone = on_layout(layout), one_process()
    heads, ffn = SHARES[layout]
    assert tuple(rank.heads for rank in ranks) == heads
    assert tuple(rank.ffn for rank in ranks) == ffn
    for name, want in alone.steps.items():
        for velocity in velocities(want):
            first = ranks[0].steps[name][velocity]
            assert all(torch.equal(rank.steps[name][velocity], first) for rank in ranks), name
            assert relative(first, want[velocity]) <= LIMIT, (name, velocity)


@pytest.mark.parametrize("layout", ["TP6", "TP3"])
def test_uneven_ranks_quantise_to_the_integers_of_one_process(layout: str) -> None:
    """Of the first block's qkv, and of its out_proj, whose input features are cut by heads."""
    ranks, alone = on_layout(layout), one_process()
    (qkv, qkv_scales), (out, out_scales) = alone.codes
    for rank in ranks:
        assert torch.equal(rank.codes[0][0], qkv) and torch.equal(rank.codes[0][1], qkv_scales)
    assert torch.equal(torch.cat([rank.codes[1][0] for rank in ranks], dim=1), out)
    assert torch.equal(torch.cat([rank.codes[1][1] for rank in ranks], dim=1), out_scales)


def test_what_does_not_go_around_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="5 heads here, too few for 6 ranks"):
        head_shares(5, 6)
    with pytest.raises(ValueError, match="80 features cannot be shared among 6 ranks in whole"):
        unit_shares(80, 6, FFN_UNITS)
    with pytest.raises(ValueError, match=r"layout must be one of single, U2, .*TP6.*, got 'TP5'"):
        demo_plan(layout="TP5")
