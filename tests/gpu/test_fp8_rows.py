"""A norm or a SwiGLU that ends in FP8 rows: the bits of the kernel and the quantiser apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.load import load_denoiser
from runtime.kernels.elementwise import load
from runtime.kernels.elementwise.base import Span
from runtime.kernels.elementwise.fp8_rows import FP8Rows
from runtime.kernels.elementwise.triton import Triton
from runtime.kernels.linear.fp8_dynamic import quantise_rows
from runtime.kernels.scaled import Scaled
from tests.denoiser_parts import demo_plan, first_block

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
HIDDEN, FFN = 5376, 14336


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def steps() -> tuple[Triton, FP8Rows]:
    plain = load("triton", CUDA)
    assert isinstance(plain, Triton)
    return plain, FP8Rows(plain)


def same(got: Scaled, want: Scaled) -> None:
    assert got.codes.shape == want.codes.shape and torch.equal(got.scale, want.scale)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 17, 1021])
@pytest.mark.parametrize("tables", [torch.float32, BF16], ids=["pruned", "full"])
def test_norm_and_modulation(rows: int, tables: torch.dtype) -> None:
    plain, fused = steps()
    x = torch.randn(rows, HIDDEN, device=CUDA).to(BF16)
    norm = nn.RMSNorm(HIDDEN, eps=1e-5, device=CUDA, dtype=BF16)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    shift, scale = (torch.randn(12, 6 * HIDDEN, device=CUDA) * 0.3).to(tables).chunk(6, -1)[:2]
    spans: tuple[Span, ...] = ((0, rows // 2, 1), (rows // 2, rows, 4))
    with torch.inference_mode():
        want = plain.norm_modulate(norm, x, shift, scale, spans)
        same(fused.norm_modulate(norm, x, shift, scale, spans), quantise_rows(want))


@pytest.mark.parametrize("rows", [1, 17, 1021])
@pytest.mark.parametrize("tables", [torch.float32, BF16], ids=["pruned", "full"])
def test_the_gated_sum_with_its_norm(rows: int, tables: torch.dtype) -> None:
    plain, fused = steps()
    x, o = (torch.randn(rows, HIDDEN, device=CUDA).to(BF16) for _ in range(2))
    norm = nn.RMSNorm(HIDDEN, eps=1e-5, device=CUDA, dtype=BF16)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    made = (torch.randn(12, 6 * HIDDEN, device=CUDA) * 0.3).to(tables)
    shift, scale, gate = made.chunk(6, dim=-1)[3:]
    spans: tuple[Span, ...] = ((0, rows // 2, 1), (rows // 2, rows, 4))
    total, again = x.clone(), x.clone()
    with torch.inference_mode():
        want = plain.gated_add_norm(total, o, gate, norm, shift, scale, spans)
        got = fused.gated_add_norm(again, o, gate, norm, shift, scale, spans)
    same(got, quantise_rows(want))
    assert torch.equal(again, total) and not torch.equal(again, x)


@pytest.mark.parametrize("rows", [1, 17, 1021])
def test_swiglu(rows: int) -> None:
    plain, fused = steps()
    wide = (torch.randn(rows, 2 * FFN, device=CUDA) * 3).to(BF16)
    same(fused.swiglu(wide), quantise_rows(plain.swiglu(wide)))


def test_swiglu_of_rows_past_the_int32_range() -> None:
    plain, fused = steps()
    wide = torch.zeros(2**31 // (2 * FFN) + 7, 2 * FFN, device=CUDA, dtype=BF16)
    wide[-1] = torch.randn(2 * FFN, device=CUDA).to(BF16)
    got, want = fused.swiglu(wide), quantise_rows(plain.swiglu(wide[-1:]))
    same(Scaled(got.codes[-1:], got.scale[-1:]), want)


@pytest.mark.parametrize("form", ["pruned_bf16", "pruned_nvfp4", "full_fp8"])
def test_blocks_compute_the_same_with_and_without(form: str) -> None:
    checkpoint = random_checkpoint("dit", size="tiny", format=form)
    name = "fp8_rowwise"
    plan = demo_plan(
        device="cuda", dtype="bf16", elementwise="triton", dense=name, nvfp4=name, fp8=name
    )
    model, _ = load_denoiser(checkpoint, plan, CUDA)
    block = model.blocks[0]
    assert isinstance(block.ops, FP8Rows) and block.mlp.ops is block.ops  # type: ignore[union-attr]
    assert isinstance(block.attn.ops, Triton)  # type: ignore[union-attr]
    assert isinstance(model.token_refiner.blocks[0].mlp.ops, Triton)  # type: ignore[union-attr]
    x = torch.randn(77, 128, device=CUDA).to(BF16)
    fused = first_block(model, x)
    block.ops = block.mlp.ops = load("triton", CUDA)  # type: ignore[union-attr]
    assert torch.equal(fused, first_block(model, x))
