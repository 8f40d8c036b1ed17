"""A full-size random video VAE on the GPU for the scripts of this folder, and how to set it up."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.load import DTYPES
from runtime.h3.video_decoder import DecoderBlock
from runtime.h3.video_vae import VideoVAE, load_video_vae
from runtime.kernels.attention import AttentionOptions, load_attention
from runtime.kernels.elementwise import load_vae

CUDA = torch.device("cuda")
FRAMES, HEIGHT, WIDTH = 124, 544, 960
LATENT = (1, 24, 37, HEIGHT // 16, WIDTH // 16)


def exact() -> None:
    """No TF32 anywhere: fp32 means fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def random_vae(dtype: str) -> VideoVAE:
    """The published sizes, weights random."""
    return load_video_vae(
        random_checkpoint("video_vae", size="full", format="fp16"),
        device=CUDA,
        dtype=DTYPES[dtype],
        attend=load_attention("sdpa", CUDA, DTYPES[dtype], AttentionOptions()),
    )[0]


def set_up(vae: VideoVAE, *, attention: str, elementwise: str, tiles: int) -> None:
    """Other backends under the same weights; Unavailable as in a plan."""
    attend = load_attention(attention, CUDA, vae.dtype, AttentionOptions())
    ops = load_vae(elementwise, CUDA)
    vae.tiles = tiles
    for block in vae.decoder.transformer_blocks:
        assert isinstance(block, DecoderBlock)
        block.ops = block.attn.ops = block.ff.ops = ops
        block.attn.attend = attend


def random_latent(*, seed: int = 0) -> Tensor:
    """[1,24,37,34,60] of 124 frames at 960x544."""
    return torch.randn(LATENT, generator=torch.Generator().manual_seed(seed))


def relative_l2(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in fp64."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())
