"""The video VAE and its int8 linear on a GPU against the same weights on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.video_vae import VideoVAE, load_video_vae
from runtime.kernels.attention import AttentionOptions, attention_backend
from runtime.kernels.linear.int8_convrot import Int8ConvRotLinear
from runtime.nonfinite import NonFinite

pytestmark = pytest.mark.gpu


def load(
    device: str,
    dtype: torch.dtype,
    format: str = "fp16",
    *,
    elementwise: str = "eager",
    tiles: int = 1,
) -> VideoVAE:
    where = torch.device(device)
    return load_video_vae(
        random_checkpoint("video_vae", size="tiny", format=format),
        device=where,
        dtype=dtype,
        elementwise=elementwise,
        tiles=tiles,
        attend=attention_backend("sdpa").load(where, AttentionOptions()),
    )[0]


def relative_l2(got: Tensor, want: Tensor) -> float:
    got, want = got.cpu().double(), want.cpu().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17, 33])
def test_int8_products_equal_the_cpus(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    packed = {
        device: PackedWeight(
            layer="layer",
            quant=LayerQuant(format="int8_tensorwise", convrot_group=64),
            shape=(24, 128),
            tensors={
                "weight": (torch.arange(24 * 128).view(24, 128) % 255 - 127).char().to(device),
                "weight_scale": (torch.arange(24.0).view(24, 1) / 1000 + 0.01).to(device),
                "bias": torch.arange(24.0).half().to(device),
            },
        )
        for device in ("cpu", "cuda")
    }
    x = torch.randint(-3, 4, (rows, 128), generator=generator).to(dtype)  # rotates exactly
    want = Int8ConvRotLinear(packed["cpu"])(x)
    assert torch.equal(Int8ConvRotLinear(packed["cuda"])(x.cuda()).cpu(), want)


# fp32: the 1x1x1 convolutions run in TF32 as in ComfyUI (contract, trap 11)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_decode_is_close_to_the_cpus(dtype: torch.dtype) -> None:
    z = torch.randn(1, 24, 9, 3, 4, generator=torch.Generator().manual_seed(0))
    want = load("cpu", torch.float32).decode(z)
    got = load("cuda", dtype).decode(z)
    assert got.device.type == "cpu"
    assert relative_l2(got, want) < 5e-3


def test_an_int8_decode_is_close_to_the_cpus() -> None:
    z = torch.randn(1, 24, 7, 3, 4, generator=torch.Generator().manual_seed(0))
    want = load("cpu", torch.float32, "int8_convrot").decode(z)
    assert relative_l2(load("cuda", torch.float16, "int8_convrot").decode(z), want) < 5e-2


def test_an_encode_is_close_to_the_cpus() -> None:
    frames = torch.rand(22, 32, 48, 3, generator=torch.Generator().manual_seed(0))
    want = load("cpu", torch.float32).encode(frames)
    assert relative_l2(load("cuda", torch.float16).encode(frames), want) < 1e-2


def wide() -> Tensor:
    """Two clips of four tiles each."""
    return torch.randn(1, 24, 12, 18, 18, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", ["fp16", "int8_convrot"])
@pytest.mark.parametrize("elementwise", ["eager", "triton"])
@pytest.mark.parametrize("tiles", [3, 8])
def test_a_batch_is_close_to_single_tiles(tiles: int, elementwise: str, format: str) -> None:
    """Another number of rows may choose another GEMM kernel, which sums in another order.

    Then an activation on the edge of two int8 codes may get the other one, 1/127 of its row's
    largest away.
    """
    want = load("cuda", torch.float16, format).decode(wide())
    got = load("cuda", torch.float16, format, elementwise=elementwise, tiles=tiles).decode(wide())
    print(f"relative L2 {relative_l2(got, want):.2e}, largest {(got - want).abs().max():.2e}")
    assert relative_l2(got, want) < (1e-2 if format == "int8_convrot" else 1e-3)


def test_tritons_steps_in_fp32_are_close_to_the_eager_ones() -> None:
    want = load("cuda", torch.float32).decode(wide())
    got = load("cuda", torch.float32, elementwise="triton", tiles=8).decode(wide())
    assert relative_l2(got, want) < 1e-5


@pytest.mark.parametrize("tiles", [1, 3, 8])
def test_bytes_are_the_floats_rounded_as_on_the_cpu(tiles: int) -> None:
    vae = load("cuda", torch.float16, tiles=tiles)
    floats = vae.decode(wide()).numpy()
    chunks = [chunk.clone() for chunk in vae.decode_stream(wide(), as_bytes=True)]
    assert [len(chunk) for chunk in chunks] == [17, 17, 5]
    want = (np.clip(floats, 0, 1) * 255 + 0.5).astype(np.uint8)
    assert np.array_equal(torch.cat(chunks).numpy(), want)


def test_values_that_are_not_finite_stop_the_bytes_too() -> None:
    z = wide()
    z[:, :, 9] = torch.nan  # of the second clip: the first chunk leaves
    stream = load("cuda", torch.float16).decode_stream(z, as_bytes=True)
    assert next(stream).dtype == torch.uint8
    with pytest.raises(NonFinite, match="video VAE decode"):
        list(stream)


def test_bytes_arrive_in_pinned_memory_that_stays_as_it_was() -> None:
    kept = [
        (chunk, chunk.clone())
        for chunk in load("cuda", torch.float16).decode_stream(wide(), as_bytes=True)
    ]
    torch.cuda.synchronize()
    assert all(chunk.is_pinned() and torch.equal(chunk, copy) for chunk, copy in kept)
