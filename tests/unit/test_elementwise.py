"""Elementwise steps by name: what is refused, and that the eager form keeps ComfyUI's aliasing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.kernels.elementwise import BACKENDS, elementwise_backend, load
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from tests.denoiser_parts import demo_plan

CPU = torch.device("cpu")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="must be one of eager, kitchen, triton, got 'fast'"):
        load("fast", CPU)


def test_triton_is_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(Unavailable, match="its kernels need a CUDA device, got cpu"):
        load("triton", CPU)


def test_kitchen_is_refused_on_a_cpu_with_the_reason() -> None:
    with pytest.raises(Unavailable, match="its kernel needs a CUDA device, got cpu"):
        load("kitchen", CPU)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_says_what_it_needs(name: str) -> None:
    backend = elementwise_backend(name)
    assert backend.name == name and backend.requirement


def test_a_plan_names_its_form_and_refuses_another() -> None:
    with pytest.raises(ValueError, match="field elementwise must be one of eager, kitchen, triton"):
        Plan(name="x", models=demo_plan().models, elementwise="fused")


def test_the_norm_is_a_new_tensor_and_the_sum_is_in_place() -> None:
    torch.manual_seed(0)
    x, o = torch.randn(6, 8), torch.randn(6, 8)
    tables = torch.randn(2, 8)
    before = x.clone()
    y = Eager().norm_modulate(nn.RMSNorm(8), x, tables, tables, [(0, 6, 1)])
    assert torch.equal(x, before) and y.data_ptr() != x.data_ptr()
    assert Eager().gated_add(x, o, tables, [(0, 6, 0)]).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_with_its_norm_is_the_sum_and_then_the_norm_of_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, o = (torch.randn(6, 8).to(dtype) for _ in range(2))
    gate, shift, scale = torch.randn(3, 2, 8)
    norm, spans = nn.RMSNorm(8, dtype=dtype), [(0, 2, 1), (2, 6, 0)]
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda _, args, out: seen.append(args[0].clone()))
    apart, at_once = x.clone(), x.clone()
    Eager().gated_add(apart, o, gate, spans)
    want = Eager().norm_modulate(norm, apart, shift, scale, spans)
    got = Eager().gated_add_norm(at_once, o, gate, norm, shift, scale, spans)
    assert torch.equal(at_once, apart) and not torch.equal(at_once, x)
    assert torch.equal(got, want) and got.data_ptr() != at_once.data_ptr()
    assert len(seen) == 2 and torch.equal(seen[1], at_once)  # parity taps the norm as a module
