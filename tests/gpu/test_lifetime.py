"""memory = low at full width on a GPU: its bits, the one operation that may differ, its peak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.h3 import lifetime
from runtime.h3.config import H3Config
from runtime.h3.model import Block, RowSpan
from runtime.kernels.attention import AttentionOptions, attention_backend, load_attention
from runtime.kernels.attention.own_v import with_own_v
from runtime.kernels.elementwise import load as load_elementwise
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.rope import rope_table
from runtime.kernels.unavailable import Unavailable

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS = 20_094  # the reference shape with 300 text rows
FULL = H3Config(
    hidden=5376,
    num_layers=1,
    num_refiner_layers=0,
    num_heads=56,
    head_dim=128,
    ffn=14336,
    text_dim=5120,
    video_channels=24,
    audio_channels=32,
    num_inv_freq=16,
    time_dim=8,
    curve_grid=1025,
    time_hidden=0,
    frequency_dim=0,
)


def block(attention: str, elementwise: str) -> Block:
    try:
        loaded = load_attention(attention, CUDA, torch.bfloat16, AttentionOptions())
        ops = load_elementwise(elementwise, CUDA)
    except Unavailable as error:
        pytest.skip(str(error))
    attend = with_own_v(loaded, strided_v=attention_backend(attention).strided_v, copy=Eager().copy)
    torch.manual_seed(0)
    with CUDA:
        made = Block(FULL, attend, ops).to(torch.bfloat16)
    return made.eval().requires_grad_(False)


def operands() -> tuple[Tensor, list[Tensor], list[RowSpan], Tensor]:
    generator = torch.Generator(CUDA).manual_seed(1)
    x = torch.randn(ROWS, FULL.hidden, device=CUDA, generator=generator).bfloat16()
    made = torch.randn(6, 12, FULL.hidden, device=CUDA, generator=generator)
    angles = torch.randn(ROWS, 48, device=CUDA, generator=generator)
    return x, list(made), [RowSpan(0, 300, 0), RowSpan(300, ROWS, 4)], rope_table(angles, x.dtype)


def peak_of(run: object, *args: object) -> tuple[Tensor, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        out = run(*args)  # type: ignore[operator]
    torch.cuda.synchronize()
    return out, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("attention", ["sdpa", "sdpa_cudnn", "fa4", "sage2"])
def test_attention_in_groups_of_heads_has_the_bits_of_all_heads(attention: str) -> None:
    plain, (_, _, _, rope) = block(attention, "triton").attn, operands()
    y = torch.randn(ROWS, FULL.hidden, device=CUDA).bfloat16()
    with torch.inference_mode():
        want = plain(y.clone(), rope)
        got = lifetime._attention(plain, [y.clone()], rope)
    assert torch.equal(got, want)


def test_only_the_mlps_matmuls_over_groups_of_rows_may_round_otherwise() -> None:
    """cuBLAS chooses its kernel by the number of rows; `-s` prints what that made here."""
    mlp = block("sdpa_cudnn", "triton").mlp
    y = torch.randn(ROWS, FULL.hidden, device=CUDA).bfloat16()
    with torch.inference_mode():
        want = mlp(y)
        got = lifetime._mlp(mlp, [y.clone()])
    off = float((got.float() - want.float()).norm() / want.float().norm())
    same = float((got == want).float().mean())
    print(f"\nMLP in groups of {lifetime.GROUP_ROWS} rows: {same:.6f} equal, relative L2 {off:.2e}")
    assert off < 2e-3  # bf16 keeps 8 bits; another order of fp32 sums moves few of the last


@pytest.mark.parametrize("elementwise", ["eager", "triton"])
def test_the_peak_of_a_block_is_at_most_three_fifths(elementwise: str) -> None:
    made, (x, *rest) = block("sdpa_cudnn", elementwise), operands()
    _, plain = peak_of(made, x.clone(), *rest)
    _, low = peak_of(lambda *given: lifetime.forward(made, *given), x.clone(), *rest)
    print(f"\n{elementwise}: plain {plain / 2**30:.2f} GiB, low {low / 2**30:.2f} GiB")
    assert low < 0.6 * plain


def test_the_whole_block_agrees() -> None:
    made, (x, *rest) = block("sdpa_cudnn", "triton"), operands()
    want, _ = peak_of(made, x.clone(), *rest)
    got, _ = peak_of(lambda *given: lifetime.forward(made, *given), x.clone(), *rest)
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 2e-3
