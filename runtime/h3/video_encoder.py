"""The video VAE's encoder: causal 3-D convolutions over one clip of frames (contract 6.3).

Axes: B batch, C channels, T frames, H height, W width.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from runtime.h3.video_tiles import Tap, tapped

SPACE_STRIDES = (2, 2, 2, 2, 1, 1)
TIME_STRIDES = (1, 2, 2, 1, 1, 1)
NUM_RES_BLOCKS = 2
NUM_GROUPS = 32
GROUP_NORM_EPS = 1e-6


class CausalConv(nn.Conv3d):
    """A 3x3x3 convolution that sees no later frame: two zero frames in front, reflected borders."""

    def __init__(
        self, channels_in: int, channels_out: int, stride: tuple[int, int] = (1, 1)
    ) -> None:
        time, space = stride
        super().__init__(channels_in, channels_out, 3, (time, space, space), device="meta")
        self.border = (0, 1, 0, 1) if space == 2 else (1, 1, 1, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """A single frame meets the last temporal tap only; the two others would see zeros."""
        x = F.pad(x_BCTHW, (*self.border, 0, 0), mode="reflect")
        if x.shape[2] == 1:
            return F.conv3d(x, self.weight[:, :, -1:], self.bias, self.stride)
        return F.conv3d(F.pad(x, (0, 0, 0, 0, 2, 0)), self.weight, self.bias, self.stride)


class FrameNorm(nn.GroupNorm):
    """GroupNorm of each frame by itself: time is folded into the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__(NUM_GROUPS, channels, eps=GROUP_NORM_EPS, device="meta")

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        """Normalise [B,C,T,H,W] frame by frame."""
        frames = x_BCTHW.transpose(1, 2)
        normed = super().forward(frames.flatten(0, 1))
        return normed.unflatten(0, frames.shape[:2]).transpose(1, 2)


class ResBlock(nn.Module):
    """Two norm-SiLU-convolution steps around a shortcut."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = FrameNorm(channels_in)
        self.conv1 = CausalConv(channels_in, channels_out)
        self.norm2 = FrameNorm(channels_out)
        self.conv2 = CausalConv(channels_out, channels_out)
        if channels_in != channels_out:
            self.nin_shortcut = nn.Conv3d(channels_in, channels_out, 1, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """[B,C,T,H,W] -> [B,C',T,H,W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class Downsample(nn.Module):
    """A strided causal convolution."""

    def __init__(self, channels: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B,C,T,H,W] -> [B,C,ceil(T/time),ceil(H/space),ceil(W/space)]."""
        return self.conv(x)


class Level(nn.Module):
    """The residual blocks of one resolution and, between resolutions, the step down."""

    def __init__(self, channels_in: int, channels_out: int, stride: tuple[int, int]) -> None:
        super().__init__()
        widths = (channels_in, *[channels_out] * NUM_RES_BLOCKS)
        self.block = nn.ModuleList(ResBlock(a, b) for a, b in pairwise(widths))
        if stride != (1, 1):
            self.downsample = Downsample(channels_out, stride)

    def forward(self, x: Tensor, name: str, on_tap: Tap | None) -> Tensor:
        """Blocks, then the downsample where this level has one."""
        x = self.blocks(x)
        tapped(on_tap, name, x)
        if hasattr(self, "downsample"):
            x = self.downsample(x)
            tapped(on_tap, f"{name}.downsample", x)
        return x

    def blocks(self, x: Tensor) -> Tensor:
        """The residual blocks alone."""
        for block in self.block:
            x = block(x)
        return x


class VideoEncoder(nn.Module):
    """Frames of one clip to the mean and log-variance of their latents (before quant_conv)."""

    def __init__(self, *, channels: tuple[int, ...], moments: int) -> None:
        super().__init__()
        self.conv_in = CausalConv(3, channels[0])
        widths = (channels[0], *channels)
        strides = tuple(zip(TIME_STRIDES, SPACE_STRIDES, strict=True))
        self.down = nn.ModuleList(
            Level(widths[i], widths[i + 1], stride) for i, stride in enumerate(strides)
        )
        self.norm_out = FrameNorm(channels[-1])
        self.conv_out = CausalConv(channels[-1], moments)

    def forward(self, x_BCTHW: Tensor, on_tap: Tap | None = None) -> Tensor:
        """ImageNet-normalised frames [B,3,T,H,W] -> [B,48,ceil(T/4),H/16,W/16]."""
        x = self.conv_in(x_BCTHW)
        tapped(on_tap, "mod/conv_in", x)
        for i, level in enumerate(self.down):
            x = level(x, f"mod/down_{i}", on_tap)
        x = self.tail(x)
        tapped(on_tap, "mod/encoder_out", x)
        return x

    def tail(self, x_BCTHW: Tensor) -> Tensor:
        """The last level's output to moments."""
        return self.conv_out(F.silu(self.norm_out(x_BCTHW)))
