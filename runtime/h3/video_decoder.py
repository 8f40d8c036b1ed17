"""The video VAE's decoder: a non-causal ViT over one clip of latents (contract 6.4).

Axes: B batch, N tokens, C channels, H heads, D head width; t, h, w latent grid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from runtime.h3.video_tiles import FRAMES_PER_TOKEN, PIXELS_PER_TOKEN, Tap, tapped
from runtime.kernels.attention import Attend
from runtime.kernels.elementwise import VaeElementwise

HEAD_WIDTH = 64
ROTARY_PAIRS = 24  # of 64 dims the first 48 turn, pairs (i, i + 24): 8 per axis, [t|h|w]
NUM_REGISTERS = 4
NUM_SUFFIX = NUM_REGISTERS + 1  # four registers, one all-zero token
NORM_EPS = 1e-5


def rotary_frequencies() -> Tensor:
    """The 8 angular frequencies of one axis, fp32; 100 ** (-i/8) would be 1 ulp off (0.1.4)."""
    exponent = torch.arange(8, dtype=torch.float32) / 8
    return 1.0 / (100**exponent)


def rotary_table(grid: tuple[int, int, int], frequencies: Tensor) -> Tensor:
    """Rotations [1,N,1,24,2,2] of a (t, h, w) grid and 5 unturned suffix tokens.

    Positions are rounded in the dtype of `frequencies` (the activations' dtype), angles are fp32.
    """
    dtype, device = frequencies.dtype, frequencies.device
    axes = [2 * ((torch.arange(n, dtype=dtype, device=device) + 0.5) / n) - 1 for n in grid]
    position_N3 = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
    position_N3 = torch.cat((position_N3, position_N3.new_zeros(NUM_SUFFIX, 3))).float()
    angle = ((2 * math.pi * position_N3).unsqueeze(-1) * frequencies.float()).flatten(1)
    cos, sin = angle.cos(), angle.sin()
    table = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2))
    return table[None, :, None].to(dtype)


def joined(tiles: list[Tensor]) -> Tensor:
    """The tiles as one batch; a single one stays as it is, not copied."""
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


class DecoderAttention(nn.Module):
    """Full attention over one clip; qkv lie interleaved per head, [q64|k64|v64]."""

    def __init__(self, hidden: int, attend: Attend, ops: VaeElementwise) -> None:
        super().__init__()
        self.num_heads = hidden // HEAD_WIDTH
        self.attend = attend
        self.ops = ops
        self.to_qkv = nn.Linear(hidden, 3 * hidden, device="meta")
        self.to_out = nn.Linear(hidden, hidden, device="meta")

    def forward(self, x_BNC: Tensor, table: Tensor) -> Tensor:
        """Attend within x [B,N,C]; NaN in the attention's output becomes 0 (contract 6.4)."""
        qkv = self.to_qkv(x_BNC).unflatten(-1, (self.num_heads, 3 * HEAD_WIDTH))
        q, k, v = qkv.chunk(3, dim=-1)
        self.ops.rms_rope(q, k, table, NORM_EPS)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.to_out(self.ops.nan_to_zero(out))


class DecoderFeedForward(nn.Module):
    """w2(silu(gate) * up) with [gate|up] = w1(x)."""

    def __init__(self, hidden: int, inner: int, ops: VaeElementwise) -> None:
        super().__init__()
        self.ops = ops
        self.w1 = nn.Linear(hidden, 2 * inner, device="meta")
        self.w2 = nn.Linear(inner, hidden, device="meta")

    def forward(self, x_BNC: Tensor) -> Tensor:
        """The gated feed-forward of x [B,N,C]."""
        return self.w2(self.ops.swiglu(self.w1(x_BNC)))


class DecoderBlock(nn.Module):
    """Pre-norm attention and feed-forward, added in place through learned scales."""

    def __init__(self, hidden: int, inner: int, attend: Attend, ops: VaeElementwise) -> None:
        super().__init__()
        self.ops = ops
        self.norm1 = nn.RMSNorm(hidden, eps=NORM_EPS, device="meta")
        self.attn = DecoderAttention(hidden, attend, ops)
        self.scale1 = nn.Parameter(torch.empty(hidden, device="meta"))
        self.norm2 = nn.RMSNorm(hidden, eps=NORM_EPS, device="meta")
        self.ff = DecoderFeedForward(hidden, inner, ops)
        self.scale2 = nn.Parameter(torch.empty(hidden, device="meta"))

    def forward(self, x_BNC: Tensor, table: Tensor, name: str, on_tap: Tap | None) -> Tensor:
        """Write the block's result into x [B,N,C] and return it."""
        attended = self.attn(self.ops.norm(self.norm1, x_BNC), table)
        tapped(on_tap, f"{name}.attn", attended)
        self.ops.scaled_add(x_BNC, attended, self.scale1)
        fed = self.ff(self.ops.norm(self.norm2, x_BNC))
        tapped(on_tap, f"{name}.ff", fed)
        self.ops.scaled_add(x_BNC, fed, self.scale2)
        tapped(on_tap, name, x_BNC)
        return x_BNC


class VideoDecoder(nn.Module):
    """Latents of one clip to raw pixels (ImageNet-normalised)."""

    inv_freq: Tensor

    def __init__(
        self,
        *,
        latent_channels: int,
        hidden: int,
        inner: int,
        depth: int,
        attend: Attend,
        ops: VaeElementwise,
    ) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(latent_channels, hidden, device="meta")
        self.register_tokens = nn.Parameter(torch.empty(1, NUM_REGISTERS, hidden, device="meta"))
        self.mask_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))  # stored, unused
        self.transformer_blocks = nn.ModuleList(
            DecoderBlock(hidden, inner, attend, ops) for _ in range(depth)
        )
        self.norm_out = nn.LayerNorm(hidden, eps=NORM_EPS, device="meta")
        patch = 3 * FRAMES_PER_TOKEN * PIXELS_PER_TOKEN**2
        self.proj_out = nn.Linear(hidden, patch, device="meta")
        self.register_buffer("inv_freq", rotary_frequencies(), persistent=False)

    def forward(self, z_BCthw: Tensor, on_tap: Tap | None = None) -> Tensor:
        """z after post_quant_conv [B,C,t,h,w] -> raw pixels [B,3,4t,16h,16w], same dtype."""
        grid = (z_BCthw.shape[2], z_BCthw.shape[3], z_BCthw.shape[4])
        table = rotary_table(grid, self.inv_freq)
        tapped(on_tap, "mod/rope_table", table)
        # not made contiguous: the copy changes fp16 results (contract 0.1.5); a batch would be
        embedded = joined([self.x_embedder(z.flatten(2).transpose(1, 2)) for z in z_BCthw.split(1)])
        tapped(on_tap, "mod/x_embedder", embedded)
        x_BNC = self.with_suffix(embedded)
        for i, block in enumerate(self.transformer_blocks):
            x_BNC = block(x_BNC, table, f"mod/block_{i}", on_tap)
        normed = self.norm_out(x_BNC)
        tapped(on_tap, "mod/norm_out", normed)
        return self.to_pixels(normed, grid)

    def with_suffix(self, x_BNC: Tensor) -> Tensor:
        """Patches, then the registers, then one all-zero token, in a new tensor."""
        registers = self.register_tokens.expand(x_BNC.shape[0], -1, -1)
        return torch.cat((x_BNC, registers, torch.zeros_like(x_BNC[:, :1])), dim=1)

    def to_pixels(self, normed_BNC: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Project every token, drop the suffix, lay the patches out as [B,3,4t,16h,16w]."""
        patches = self.proj_out(normed_BNC)[:, :-NUM_SUFFIX]
        size = (3, FRAMES_PER_TOKEN, PIXELS_PER_TOKEN, PIXELS_PER_TOKEN)
        x = patches.unflatten(1, grid).unflatten(-1, size)  # B t h w 3 4 16 16
        x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)
        t, h, w = grid
        return x.reshape(
            x.shape[0], 3, t * FRAMES_PER_TOKEN, h * PIXELS_PER_TOKEN, w * PIXELS_PER_TOKEN
        )
