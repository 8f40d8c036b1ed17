"""The arithmetic of SageAttention's kernels on the CPU: close to softmax, and wrong with ghosts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import sage_reference
from runtime.kernels.attention.sage_reference import SAGE1, SageMaths, sage_attention

KERNELS = ("FP16_TRITON", "FP16_CUDA", "FP8_FP32", "FP8_FP16", "FP8_SM90", "FP8_SM120")
HEADS, DIM = 3, 128


def qkv(rows: int, *, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """[1, H, S, d]; `mean`: of all keys, along what all queries have in common."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(1, HEADS, rows, DIM, generator=generator) for _ in range(3))
    return [(q + 1).to(dtype), (k + mean).to(dtype), v.to(dtype)]


def softmax(q: Tensor, k: Tensor, v: Tensor, ghosts: int = 0) -> Tensor:
    """float64; `ghosts` keys of logit 0 and value 0 take part."""
    logits = q.double() @ k.double().transpose(-1, -2) / math.sqrt(DIM)
    weights = torch.nn.functional.pad(logits, (0, ghosts)).softmax(-1)[..., : k.shape[-2]]
    return (weights @ v.double()).transpose(1, 2).flatten(2)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def kernel(name: str) -> SageMaths:
    found = getattr(sage_reference, name)
    assert isinstance(found, SageMaths)
    return found


@pytest.mark.parametrize("rows", [1, 63, 64, 129, 333])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_near_the_softmax_at_any_number_of_rows(name: str, rows: int) -> None:
    q, k, v = qkv(rows, mean=-0.5)
    got = sage_attention(q, k, v, kernel(name))
    assert got.shape == (1, rows, HEADS * DIM) and got.dtype == torch.bfloat16
    # e4m3 has 3 bits of mantissa: values and probabilities within 1/16, averaged over keys
    assert error(got, softmax(q, k, v)) < (0.06 if "FP8" in name else 0.03)


@pytest.mark.parametrize("name", KERNELS)
def test_no_operand_is_written(name: str) -> None:
    operands = qkv(70)
    before = [x.clone() for x in operands]
    sage_attention(*operands, kernel(name))
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))


@pytest.mark.parametrize("rows", [64, 192])
def test_sage1_is_near_the_softmax_at_whole_tiles(rows: int) -> None:
    q, k, v = qkv(rows, mean=-0.5)
    assert error(sage_attention(q, k, v, SAGE1), softmax(q, k, v)) < 0.03


def test_33_ghost_keys_are_why_sage1_refuses_rows_that_do_not_fill_a_tile() -> None:
    """Smoothed keys have logits around 0, as the ghosts do: 33 of 384 shares go to them."""
    rows = 351  # 33 short of six tiles, as the reference shape's 20,511 is of 321
    q, k, v = qkv(rows)
    k, v = k * 0.1, v + 2
    centred = k - k.mean(-2, keepdim=True)
    exact, with_ghosts = softmax(q, centred, v), softmax(q, centred, v, ghosts=33)
    got = sage_attention(q, k, v, SAGE1)
    assert error(got, with_ghosts) < 0.01
    assert error(got, exact) > 0.08
    assert error(sage_attention(q, k, v, kernel("FP16_TRITON")), exact) < 0.01  # with a tail mask


def test_per_thread_scales_follow_the_rows_of_a_warp() -> None:
    """A row eight times as large spoils only the rows i % 8 == 3 of its warp."""
    q, k, v = qkv(64)
    q[:, :, 3] *= 64
    fine = sage_attention(q, k, v, kernel("FP16_CUDA"))[0].unflatten(1, (HEADS, DIM))
    want = softmax(q, k, v)[0].unflatten(1, (HEADS, DIM))
    off = (fine.double() - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))
    same = torch.arange(64) % 8 == 3
    spoiled = same & (torch.arange(64) < 32) & (torch.arange(64) != 3)
    assert off[spoiled].min() > 4 * off[32:].median()
    assert off[~same].max() < off[spoiled].min()


def test_the_capped_values_keep_a_tile_within_fp16() -> None:
    """64 keys of the largest value: 448 * 2.25 * 64 is below 65,504."""
    q, k, _ = qkv(64)
    v = torch.full_like(q, 3.0)
    got = sage_attention(torch.zeros_like(q), k, v, kernel("FP8_SM120"))
    assert error(got, torch.full_like(got, 3.0).double()) < 1e-2


def test_a_head_of_zeros_is_zero() -> None:
    zero = torch.zeros(1, HEADS, 65, DIM, dtype=torch.float16)
    assert torch.equal(
        sage_attention(zero, zero, zero, kernel("FP8_SM90")),
        torch.zeros(1, 65, HEADS * DIM, dtype=torch.float16),
    )
