"""Triton's kernels of the video VAE's decoder against the eager form on the same GPU.

fp16: the same roundings; only a sum of squares added in another order may move a value to its
neighbour. A lost rounding moves a third of the values and gives a relative L2 of 2e-4 or more.
fp32: nothing hides the other order, so only the relative L2 is limited.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.h3.video_decoder import rotary_frequencies, rotary_table
from runtime.kernels.elementwise import load_vae

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TILES, HIDDEN, INNER, HEADS, HEAD = 2, 2048, 8192, 32, 64
GRID = (7, 16, 16)
TOKENS = 7 * 16 * 16 + 5
DTYPES = [torch.float16, torch.float32]


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def near(got: Tensor, want: Tensor, *, share: float) -> None:
    """The share of fp16 values that differ, and how far all lie apart."""
    assert got.dtype == want.dtype and got.shape == want.shape
    far = float((got.double() - want.double()).norm() / want.double().norm())
    moved = float((got != want).float().mean())
    print(f"{want.dtype}: {moved:.2e} of the values differ, relative L2 {far:.2e}")
    if want.dtype == torch.float16:
        assert moved <= share and far < 2e-5
    else:
        assert far < 5e-7


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(HIDDEN, eps=1e-5, device=CUDA, dtype=dtype)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    x = normal(TILES, TOKENS, HIDDEN, dtype=dtype)
    with torch.inference_mode():
        want, got = (load_vae(name, CUDA).norm(norm, x) for name in ("eager", "triton"))
    assert got.data_ptr() != x.data_ptr()
    near(got, want, share=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_rotation_write_q_and_k_of_the_qkv_buffer(dtype: torch.dtype) -> None:
    qkv = normal(TILES, TOKENS, 3 * HEADS * HEAD, dtype=dtype)
    table = rotary_table(GRID, rotary_frequencies().to(CUDA, dtype))

    def rotated(name: str) -> Tensor:
        buffer = qkv.clone()
        q, k, _ = buffer.unflatten(-1, (HEADS, 3 * HEAD)).chunk(3, dim=-1)
        load_vae(name, CUDA).rms_rope(q, k, table, 1e-5)
        return buffer.unflatten(-1, (HEADS, 3, HEAD))

    want, got = rotated("eager"), rotated("triton")
    assert torch.equal(got[..., 2, :], qkv.unflatten(-1, (HEADS, 3, HEAD))[..., 2, :])
    assert not torch.equal(got[..., 1, :], qkv.unflatten(-1, (HEADS, 3, HEAD))[..., 1, :])
    near(got, want, share=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    gate_up = normal(TILES, TOKENS, 2 * INNER, dtype=dtype) * 2
    want, got = (load_vae(name, CUDA).swiglu(gate_up) for name in ("eager", "triton"))
    near(got, want, share=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scaled_sum_is_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    x, o = (normal(TILES, TOKENS, HIDDEN, dtype=dtype) for _ in range(2))
    scale = normal(HIDDEN, dtype=dtype)
    want, got = x.clone(), x.clone()
    load_vae("eager", CUDA).scaled_add(want, o, scale)
    load_vae("triton", CUDA).scaled_add(got, o, scale)
    near(got, want, share=1e-6)


def test_rows_past_the_int32_range_are_right() -> None:
    rows = 2**31 // (2 * INNER) + 7
    gate_up = torch.zeros(1, rows, 2 * INNER, device=CUDA, dtype=torch.float16)
    gate_up[:, -1] = normal(2 * INNER, dtype=torch.float16)
    got = load_vae("triton", CUDA).swiglu(gate_up)
    near(got[:, -1], load_vae("eager", CUDA).swiglu(gate_up[:, -1:])[:, 0], share=1e-3)


def test_tensors_that_lie_otherwise_are_refused() -> None:
    with pytest.raises(ValueError, match="do not take tensors laid out like this"):
        load_vae("triton", CUDA).swiglu(normal(1, 64, 32, dtype=torch.float16).transpose(1, 2))
