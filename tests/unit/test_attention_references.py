"""CPU references of the lossy attention backends against a float64 softmax, at any row count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention.int8_reference import int8_attention, rotated
from runtime.kernels.attention.nvfp4_reference import nvfp4_attention, round_fp4
from runtime.kernels.attention.sol_reference import BLOCK, exact_blocks, sol_attention

HEADS = 2
RAGGED = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 300)
FP4_ERROR = 0.21  # flashinfer documents 0.19 on Gaussian input (performance.md 1.4)
INT8_ERROR = 2.8e-2  # comfy-kitchen's kernel on one H200 (performance.md 5.1)
ALL = 999


def gaussian(rows: int, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(1, rows, HEADS, dim, generator=generator).to(dtype).transpose(1, 2)
        for _ in range(3)
    )


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v.double()).transpose(1, 2).flatten(2)


def relative_l2(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


# ---- FP4


def test_every_fp4_number_is_kept() -> None:
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    both = torch.cat([levels, -levels])
    assert torch.equal(round_fp4(both), both)


def test_fp4_rounds_ties_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0])
    x = torch.cat([ties, torch.tensor([6.0] + [0.0] * 5)])
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0])
    assert torch.equal(round_fp4(x)[:10], want)


def test_each_sixteen_numbers_have_their_own_scale() -> None:
    small, large = torch.full((16,), 0.01171875), torch.full((16,), 96.0)
    assert torch.equal(round_fp4(torch.cat([small, large])), torch.cat([small, large]))


def test_a_block_of_zeros_stays_zero() -> None:
    assert torch.equal(round_fp4(torch.zeros(2, 32)), torch.zeros(2, 32))


@pytest.mark.parametrize("per_block_mean", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", RAGGED)
def test_fp4_attention_has_the_published_error(rows: int, dim: int, per_block_mean: bool) -> None:
    q, k, v = gaussian(rows, dim)
    got = nvfp4_attention(q, k, v, per_block_mean=per_block_mean)
    assert got.shape == (1, rows, HEADS * dim) and got.dtype == torch.bfloat16
    error = relative_l2(got, softmax_attention(q, k, v))
    assert error < FP4_ERROR and (rows < 16 or error > 0.1)


def test_fp4_smoothing_takes_out_what_all_queries_and_keys_share() -> None:
    q, k, v = gaussian(300)
    shared = torch.zeros(128)
    shared[7] = 40.0
    q, k = q + shared.bfloat16(), k + shared.bfloat16()
    got = nvfp4_attention(q, k, v, per_block_mean=True)
    assert relative_l2(got, softmax_attention(q, k, v)) < FP4_ERROR


# ---- INT8 with rotation


@pytest.mark.parametrize("size", [4, 64, 128])
def test_the_rotation_is_orthonormal(size: int) -> None:
    matrix = rotated(torch.eye(size), size)
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [*RAGGED, 1025])
def test_int8_attention_has_the_measured_error(rows: int, dim: int) -> None:
    q, k, v = gaussian(rows, dim)
    got = int8_attention(q, k, v)
    assert got.shape == (1, rows, HEADS * dim) and got.dtype == torch.bfloat16
    error = relative_l2(got, softmax_attention(q, k, v))
    assert error < INT8_ERROR and (rows < 16 or error > 5e-3)


def test_the_rotation_saves_keys_whose_signal_is_in_few_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H3's last blocks (performance.md 1.7): one channel that sets the scale of all others."""
    q, k, v = gaussian(300)
    k = k.clone()
    k[..., 5] *= 40
    want = softmax_attention(q, k, v)
    with_rotation = relative_l2(int8_attention(q, k, v), want)
    monkeypatch.setattr("runtime.kernels.attention.int8_reference.rotated", lambda x, size: x)
    assert with_rotation < 0.6 * relative_l2(int8_attention(q, k, v), want)


# ---- Sol


@pytest.mark.parametrize("rows", RAGGED)
def test_sol_with_all_blocks_as_sinks_is_the_softmax(rows: int) -> None:
    q, k, v = gaussian(rows, dtype=torch.float32)
    got = sol_attention(q, k, v, tau=1.0, sink_blocks=ALL)
    assert relative_l2(got, softmax_attention(q, k, v)) < 2e-6


def test_two_blocks_are_neighbours_and_so_exact() -> None:
    q, k, v = gaussian(2 * BLOCK, dtype=torch.float32)
    got = sol_attention(q, k, v, tau=10.0, sink_blocks=0)
    assert relative_l2(got, softmax_attention(q, k, v)) < 2e-6


@pytest.mark.parametrize("rows", [300, 330])
def test_a_summary_of_equal_keys_loses_nothing(rows: int) -> None:
    """Every block's keys are one key: its mean, its length and its values' sum say all of it."""
    generator = torch.Generator().manual_seed(0)
    q, _, v = gaussian(rows, dtype=torch.float32)
    means = torch.randn(1, HEADS, -(-rows // BLOCK), 128, generator=generator)
    k = means.repeat_interleave(BLOCK, dim=2)[:, :, :rows]
    q = q[:, :, :1].expand(-1, -1, rows, -1)  # and one query: block scores are row scores
    got = sol_attention(q, k, v, tau=10.0, sink_blocks=0)
    assert relative_l2(got, softmax_attention(q, k, v)) < 2e-6


def test_a_higher_threshold_is_exact_for_fewer_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 60, 128, generator=generator)
    kept = [int(exact_blocks(q @ k.t(), q, k, tau, 0).sum()) for tau in (0.0, 1.0, 2.0)]
    assert kept[0] > kept[1] > kept[2] > 3 * 60 - 2


def test_sinks_are_exact_as_keys_and_as_queries() -> None:
    exact = exact_blocks(torch.zeros(9, 9), torch.ones(9, 4), torch.ones(9, 4), 1.0, 2)
    assert exact[:2].all() and exact[:, :2].all() and not exact[4, 7]


@pytest.mark.parametrize("kind", ["fp4", "int8", "sol"])
def test_no_reference_writes_its_operands(kind: str) -> None:
    given = gaussian(130)
    before = [x.clone() for x in given]
    if kind == "fp4":
        nvfp4_attention(*given, per_block_mean=True)
    elif kind == "int8":
        int8_attention(*given)
    else:
        sol_attention(*given, tau=1.0, sink_blocks=1)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
