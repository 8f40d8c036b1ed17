"""Attention by name: refusals with reasons, and SDPA against a float64 softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import (
    BACKENDS,
    AttentionOptions,
    attention_backend,
    load_attention,
)
from runtime.kernels.unavailable import Unavailable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = AttentionOptions()
HEADS, DIM = 3, 128
NEED_A_GPU = ("sdpa_cudnn", "fa4")


def packed_views(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1,H,S,d] as the denoiser makes them: views of one [S, 3*H*d] buffer."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, 3 * HEADS * DIM, generator=generator).to(dtype)
    q, k, v = (t.unflatten(-1, (HEADS, DIM))[None].transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    return q, k, v


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1,S,H*d] in float64, one head at a time."""
    heads = [
        torch.softmax(q[0, h].double() @ k[0, h].double().t() / math.sqrt(DIM), dim=-1)
        @ v[0, h].double()
        for h in range(HEADS)
    ]
    return torch.cat(heads, dim=-1)[None]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"sdpa, sdpa_cudnn.*, got 'flash5'"):
        attention_backend("flash5")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_registered_under_its_own_name(name: str) -> None:
    assert attention_backend(name).name == name


def test_cudnn_attention_refuses_the_cpu_with_the_reason() -> None:
    with pytest.raises(Unavailable, match=r"'sdpa_cudnn' cannot run here: it needs a CUDA device"):
        attention_backend("sdpa_cudnn").load(CPU, PLAIN)


def test_cudnn_attention_refuses_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(Unavailable, match=r"8\.0 or newer"):
        attention_backend("sdpa_cudnn").load(CUDA, PLAIN)


def test_sdpa_names_its_kernel_and_the_torch_version() -> None:
    assert attention_backend("sdpa").route(CPU, PLAIN) == f"torch {torch.__version__} SDPA cpu"
    assert "flash" in attention_backend("sdpa").route(CUDA, PLAIN)


@pytest.mark.parametrize("rows", [1, 63, 64, 1021])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_sdpa_is_the_softmax_at_ragged_lengths(rows: int, dtype: torch.dtype, limit: float) -> None:
    q, k, v = packed_views(rows, dtype)
    out = attention_backend("sdpa").load(CPU, PLAIN)(q, k, v)
    want = softmax_attention(q, k, v)
    assert out.shape == (1, rows, HEADS * DIM) and out.dtype == dtype
    assert float((out.double() - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in NEED_A_GPU])
def test_each_tile_of_a_batch_is_attended_to_by_itself(name: str) -> None:
    """The video VAE decodes tiles together: a backend that sees the first one alone is wrong."""
    attend = load_attention(name, CPU, torch.bfloat16, PLAIN)
    q, k, v = (torch.cat([x, x.flip(2), -x]) for x in packed_views(128, torch.bfloat16))
    apart = [attend(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(3)]
    assert torch.equal(attend(q, k, v), torch.cat(apart))


def test_sdpa_attends_in_both_directions() -> None:
    """A change of the last row reaches the first one: no causal mask."""
    q, k, v = (t.clone() for t in packed_views(65, torch.float32))
    attend = attention_backend("sdpa").load(CPU, PLAIN)
    before = attend(q, k, v)
    v[:, :, -1] += 1
    assert not torch.equal(attend(q, k, v)[:, 0], before[:, 0])


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (5, torch.float32)])
def test_what_cudnn_cannot_do_runs_on_sdpa_and_the_route_says_so(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype
) -> None:
    """The text of an empty prompt is one row."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend = attention_backend("sdpa_cudnn")
    q, k, v = packed_views(rows, dtype)
    want = attention_backend("sdpa").load(CPU, PLAIN)(q, k, v)
    assert torch.equal(backend.load(CUDA, PLAIN)(q, k, v), want)
    assert backend.route(CUDA, PLAIN).endswith("(fp32: efficient, one row: flash)")


def test_a_dtype_that_a_backend_cannot_compute_is_refused_at_load() -> None:
    said = r"'sage2' cannot run here: it computes bfloat16 and float16 only, .* torch\.float32"
    with pytest.raises(Unavailable, match=said):
        load_attention("sage2", CUDA, torch.float32, PLAIN)
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        load_attention("sdpa_cudnn", CPU, torch.float16, PLAIN)
