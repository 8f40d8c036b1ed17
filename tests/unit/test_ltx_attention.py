"""Attention of LTX: which backends are open, and that they take keys of another number of rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import BACKENDS
from runtime.kernels.attention import sdpa_math as math_backend
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.attention import OPEN, load_ltx_attention
from tests.ltx_parts import tiny_config

CPU = torch.device("cpu")


def operands(rows: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(batch, 3, rows, 64, generator=generator)
    k, v = (torch.randn(batch, 3, keys, 64, generator=generator) for _ in range(2))
    return q, k, v


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights @ v.double()).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("rows", "keys"), [(24, 9), (9, 24), (9, 1), (1, 300), (130, 257)])
@pytest.mark.parametrize("name", ["sdpa", "sdpa_math", "sage2"])
def test_open_backends_attend_to_another_number_of_keys(name: str, rows: int, keys: int) -> None:
    half = name == "sage2"
    dtype = torch.bfloat16 if half else torch.float32
    config = tiny_config(attention_head_dim=64, audio_attention_head_dim=64)
    attend = load_ltx_attention(name, config, CPU, dtype)
    q, k, v = (x.to(dtype) for x in operands(rows, keys))
    want = softmax(q, k, v)
    error = float((attend(q, k, v).double() - want).norm() / want.norm())
    assert error < (0.06 if half else 1e-6)  # e4m3 values, as in test_sage_reference


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in OPEN])
def test_every_other_backend_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(Unavailable, match="has not passed the gate on LTX; choose attention sdpa"):
        load_ltx_attention(name, tiny_config(), CPU, torch.bfloat16)


def test_sage2_takes_no_narrow_heads_and_no_fp32() -> None:
    narrow_audio = tiny_config(attention_head_dim=128, audio_attention_head_dim=8)
    with pytest.raises(Unavailable, match="head dims 64 and 128, this model has 8"):
        load_ltx_attention("sage2", narrow_audio, CPU, torch.bfloat16)
    with pytest.raises(Unavailable, match="a model of this plan runs in torch"):
        load_ltx_attention("sage2", narrow_audio, CPU, torch.float32)


def test_torch_math_counts_scores_of_rows_and_keys() -> None:
    most = math_backend.MOST_ROWS
    assert math_backend.heads_at_once(most // 4, keys=4 * most) >= 1
    with pytest.raises(Unavailable, match=f"got {most} by {2 * most} keys"):
        math_backend.heads_at_once(most, keys=2 * most)
