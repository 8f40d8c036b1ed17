"""Attention backends on a GPU, past the row where a strided V overflows a 32-bit index (R01)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import AttentionOptions, attention_backend

pytestmark = pytest.mark.gpu

EXACT = ("sdpa", "sdpa_cudnn")  # the others quantise
HEADS, DIM = 56, 128
WIDTH = 3 * HEADS * DIM
ROWS = 100_352  # row 99,865 of a [S, 21504] buffer lies past 2**31 elements
LAST = 256


def softmax_rows(q_Sd: Tensor, k_Sd: Tensor, v_Sd: Tensor) -> Tensor:
    """The last rows in float64, 64 queries at a time."""
    out = [
        torch.softmax(part.double() @ k_Sd.double().t() / math.sqrt(DIM), dim=-1) @ v_Sd.double()
        for part in q_Sd[-LAST:].split(64)
    ]
    return torch.cat(out)


@pytest.mark.parametrize("name", EXACT)
def test_rows_past_the_int32_bound_are_right_with_q_and_k_in_the_qkv_buffer(name: str) -> None:
    device = torch.device("cuda")
    attend = attention_backend(name).load(device, AttentionOptions())
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    for part in qkv.split(8192):
        part.normal_(generator=generator)
    q, k, v = (t.unflatten(-1, (HEADS, DIM)) for t in qkv.chunk(3, dim=-1))
    q, k, v = q[:, -1:], k[:, -1:], v[:, -1:].clone()  # one head, the last: the farthest offsets
    out = attend(*(t[None].transpose(1, 2) for t in (q, k, v)))[0, -LAST:]
    want = softmax_rows(q[:, 0], k[:, 0], v[:, 0])
    assert float((out.double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("rows", [1, 63, 64, 1021])
@pytest.mark.parametrize("name", EXACT)
def test_ragged_lengths_are_the_softmax(name: str, rows: int) -> None:
    device = torch.device("cuda")
    attend = attention_backend(name).load(device, AttentionOptions())
    generator = torch.Generator(device).manual_seed(rows)
    qkv = torch.randn(rows, 3 * DIM, device=device, generator=generator).bfloat16()
    q, k, v = qkv.chunk(3, dim=-1)
    out = attend(q[None, None], k[None, None], v[None, None].contiguous())[0, -LAST:]
    want = softmax_rows(q, k, v)
    assert float((out.double() - want).norm() / want.norm()) < 1e-2
