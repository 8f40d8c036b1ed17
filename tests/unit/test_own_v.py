"""V of the denoiser: a view where the backend takes one, else a packed copy in the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.load import load_denoiser
from runtime.kernels.attention import (
    BACKENDS,
    Attend,
    AttentionOptions,
    attention_backend,
    sage2,
    sdpa,
)
from runtime.kernels.attention.own_v import with_own_v
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.rope import rope_table
from tests.denoiser_parts import demo_plan

CPU = torch.device("cpu")
COPY = Eager().copy
HEADS, DIM = 56, 128


def fused(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1,H,S,d] of one [S, 3*H*d] buffer at the model's width."""
    generator = None if device == "meta" else torch.Generator().manual_seed(rows)
    qkv = torch.empty(rows, 3 * HEADS * DIM, dtype=torch.bfloat16, device=device)
    qkv.normal_(generator=generator)
    q, k, v = (t.unflatten(-1, (HEADS, DIM))[None].transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    return q, k, v


class Spy:
    """Keeps what attention is given."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.given.append((q, k, v))
        return q.transpose(1, 2).flatten(2)


def handed(rows: int, *, strided_v: bool, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(v as given, v as the backend got it)."""
    spy, (q, k, v) = Spy(), fused(rows, device)
    with_own_v(spy, strided_v=strided_v, copy=COPY)(q, k, v)
    ((got_q, got_k, got_v),) = spy.given
    assert got_q is q and got_k is k
    return v, got_v


@pytest.mark.parametrize("rows", [1, 5])
def test_a_backend_that_says_nothing_gets_a_packed_copy(rows: int) -> None:
    v, got = handed(rows, strided_v=False)
    assert torch.equal(got, v) and got.data_ptr() != v.data_ptr()
    assert got.transpose(1, 2).is_contiguous()
    assert got.untyped_storage().nbytes() == got.numel() * got.element_size()


def test_a_backend_that_takes_a_view_gets_v_where_it_lies() -> None:
    v, got = handed(5, strided_v=True)
    assert got.data_ptr() == v.data_ptr() and got.stride() == v.stride()


@pytest.mark.parametrize(("rows", "packed"), [(99_864, False), (99_866, True), (199_808, True)])
def test_past_32_bit_offsets_a_view_is_copied_too(rows: int, packed: bool) -> None:
    """V's own rows count from its first value: it is the last third of the buffer."""
    v, got = handed(rows, strided_v=True, device="meta")
    assert (got.stride() != v.stride()) is packed
    farthest = sum((n - 1) * stride for n, stride in zip(got.shape, got.stride(), strict=True))
    assert farthest < 2**31


def test_the_backends_that_take_a_view_are_those_measured_or_that_make_their_own_v() -> None:
    views = {name for name in BACKENDS if attention_backend(name).strided_v}
    assert views == {"fa4", "sage2", "sage3", "sage3_flashinfer", "kj"}


@pytest.mark.parametrize("name", ["sage2", "sage3", "sage3_flashinfer", "kj"])
def test_the_cpu_references_have_the_same_bits_on_a_view(name: str) -> None:
    attend: Attend = attention_backend(name).load(CPU, AttentionOptions())
    q, k, v = (x[:, :3] for x in fused(130))
    viewed = with_own_v(attend, strided_v=True, copy=COPY)(q, k, v)
    assert torch.equal(viewed, with_own_v(attend, strided_v=False, copy=COPY)(q, k, v))


@pytest.mark.parametrize("memory", ["plain", "low"])
@pytest.mark.parametrize("strided", [False, True])
def test_the_denoiser_hands_v_over_as_its_backend_says(
    monkeypatch: pytest.MonkeyPatch, strided: bool, memory: str
) -> None:
    spy, module = Spy(), sage2 if strided else sdpa
    monkeypatch.setattr(module, "BACKEND", replace(module.BACKEND, load=lambda *_: spy))
    plan = demo_plan(attention=module.BACKEND.name, dtype="bf16", memory=memory)
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    model, _ = load_denoiser(checkpoint, plan, CPU)
    x = torch.randn(9, model.cfg.hidden).to(model.dtype)
    tables = [torch.randn(6, model.cfg.hidden) for _ in range(6)]
    rope = rope_table(torch.randn(9, 3 * model.cfg.num_inv_freq), model.dtype)
    with torch.inference_mode():
        model.blocks[0](x, tables, [(0, 9, 1)], rope)
    assert spy.given
    for q, _, v in spy.given:
        assert (v.stride() == q.stride()) is strided
        assert v.transpose(1, 2).is_contiguous() is not strided
