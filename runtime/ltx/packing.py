"""Latents to tokens and back, token positions, rotation tables (ltx25.md sections 2, 3.4, 3.5).

B batch, N video tokens, A audio tokens, T tokens of either, H heads, r = head width / 2.
Positions and angles are float32 and formed in one fixed order: at the top frequency (pi/2 * 10^4)
one ulp of a second moves a cosine by 10^-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.ltx.config import LTXConfig
from runtime.ltx.sizes import (
    AUDIO_BINS,
    AUDIO_CHANNELS,
    FRAMES_PER_LATENT,
    PIXELS_PER_LATENT,
    LatentShape,
)

Seconds = Literal["divide", "multiply"]
SECONDS: tuple[Seconds, ...] = ("divide", "multiply")

_MEL_PER_LATENT = 4
_MEL_HOP, _MEL_RATE = 160, 16000  # samples a mel frame, samples a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """cos and sin, each [B or 1, H, T, r]; their dtype is the one that rotations run in."""

    cos_BHTr: Tensor
    sin_BHTr: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTables:
    """Rotations of one clip: self attention of each stream, and attention between the streams."""

    video: Rotation
    audio: Rotation
    video_cross: Rotation
    audio_cross: Rotation


def video_tokens(latent_BCFhw: Tensor) -> Tensor:
    """[B, C, F, h, w] -> [B, F*h*w, C]."""
    return latent_BCFhw.flatten(2).transpose(1, 2)


def video_latent(tokens_BNC: Tensor, shape: LatentShape) -> Tensor:
    """[B, F*h*w, C] -> [B, C, F, h, w]."""
    sizes = (shape.frames, shape.height, shape.width)
    return tokens_BNC.transpose(1, 2).unflatten(2, sizes)


def audio_tokens(latent_B8A16: Tensor) -> Tensor:
    """[B, 8, A, 16] -> [B, A, 128], channels before bins."""
    return latent_B8A16.transpose(1, 2).flatten(2)


def audio_latent(tokens_BAC: Tensor) -> Tensor:
    """[B, A, 128] -> [B, 8, A, 16]."""
    return tokens_BAC.unflatten(2, (AUDIO_CHANNELS, AUDIO_BINS)).transpose(1, 2)


def keyframe_mask(shape: LatentShape, device: torch.device | str = "cpu") -> Tensor:
    """[1, N, 1] fp32: 1 for tokens whose latent holds a single frame, which is the first one's."""
    mask_1N1 = torch.zeros(1, shape.video_tokens, 1, device=device)
    mask_1N1[:, : shape.frame_tokens] = 1
    return mask_1N1


def rope_tables(
    config: LTXConfig,
    shape: LatentShape,
    fps: float,
    *,
    seconds: Seconds = "divide",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> RopeTables:
    """All rotations of a clip, computed in float32 on the CPU, spread over tokens on the device.

    seconds: frames / fps as the model was trained, or frames * (1/fps) as ComfyUI has it.
    dtype: fp32 rotates in fp32; the latents' dtype as ComfyUI rounds its tables.
    """
    video = [_midpoint(edges_P2) for edges_P2 in video_positions(shape, fps, seconds=seconds)]
    audio = _midpoint(audio_positions(shape.audio))
    span, audio_span = (
        config.positional_embedding_max_pos,
        config.audio_positional_embedding_max_pos,
    )
    heads, audio_heads = config.num_attention_heads, config.audio_num_attention_heads
    inner = config.audio_cross_attention_dim  # of the attentions between the streams
    longest = [config.cross_max_pos]
    make = partial(rotation, theta=config.positional_embedding_theta, device=device, dtype=dtype)
    times = make(video[:1], longest, inner=inner, heads=audio_heads, repeat=shape.frame_tokens)
    return RopeTables(
        video=make(video, span, inner=config.video_dim, heads=heads),
        audio=make([audio], audio_span, inner=config.audio_dim, heads=audio_heads),
        video_cross=times,
        audio_cross=make([audio], longest, inner=inner, heads=audio_heads),
    )


def rotation(
    axes: Sequence[Tensor],
    spans: Sequence[int],
    *,
    inner: int,
    heads: int,
    theta: float,
    repeat: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Tables [1, H, T, r] of the tokens of a grid (section 3.4, "split").

    axes: fp32 positions along each of X axes, on the CPU, each over its span; the first is the
    slowest. repeat: so many tokens in a row share a position. The inner/2 angles of a token are
    frequency-major and axis-minor, zeros before them where they are fewer; a head takes a run of
    them, so that heads own different bands.
    """
    frequency_n = frequencies(inner // (2 * len(axes)), theta)
    angles = [
        ((position_P / span).unsqueeze(-1) * 2 - 1) * frequency_n
        for position_P, span in zip(axes, spans, strict=True)
    ]
    missing = inner // 2 - len(axes) * len(frequency_n)
    tables = []
    for values, still in (([a.cos() for a in angles], 1.0), ([a.sin() for a in angles], 0.0)):
        table_TK = _over_grid([v.to(device, dtype) for v in values])
        table_TK = F.pad(table_TK.repeat_interleave(repeat, dim=0), (missing, 0), value=still)
        tables.append(table_TK.unflatten(1, (heads, -1)).transpose(0, 1)[None])
    return Rotation(cos_BHTr=tables[0], sin_BHTr=tables[1])


def _over_grid(tables: Sequence[Tensor]) -> Tensor:
    """Of each axis [P, n] -> of each token of their grid [T, n*X]: few cosines serve many."""
    sizes = [len(table_Pn) for table_Pn in tables]
    spread = []
    for axis, table_Pn in enumerate(tables):
        shape = [1] * len(tables)
        shape[axis] = sizes[axis]
        spread.append(table_Pn.view(*shape, -1).expand(*sizes, -1))
    return torch.stack(spread, dim=-1).flatten(-2).flatten(0, -2)


def frequencies(count: int, theta: float) -> Tensor:
    """theta^linspace(0, 1) * pi/2, float64 rounded to float32."""
    exponent = torch.linspace(0.0, 1.0, count, dtype=torch.float64)
    return (torch.pow(theta, exponent) * torch.pi / 2.0).to(torch.float32)


def video_positions(
    shape: LatentShape, fps: float, *, seconds: Seconds = "divide"
) -> tuple[Tensor, Tensor, Tensor]:
    """[start, end) of the latents of each axis: seconds [F, 2], pixel rows [h, 2], columns [w, 2].

    The first latent frame holds one frame, every other eight.
    """
    if seconds not in SECONDS:
        raise ValueError(f"seconds must be one of {', '.join(SECONDS)}, got {seconds!r}")
    frame_F2 = _edges(shape.frames) * FRAMES_PER_LATENT
    frame_F2 = (frame_F2 + 1 - FRAMES_PER_LATENT).clamp(min=0)
    seconds_F2 = frame_F2 / fps if seconds == "divide" else frame_F2 * (1.0 / fps)
    rows, columns = _edges(shape.height), _edges(shape.width)
    return seconds_F2, rows * PIXELS_PER_LATENT, columns * PIXELS_PER_LATENT


def audio_positions(length: int) -> Tensor:
    """[start, end) in seconds of audio latents, [A, 2]; the first holds one mel frame."""
    mel_A2 = (_edges(length) * _MEL_PER_LATENT + 1 - _MEL_PER_LATENT).clamp(min=0)
    return mel_A2 * _MEL_HOP / _MEL_RATE


def _edges(count: int) -> Tensor:
    start = torch.arange(count, dtype=torch.float32)
    return torch.stack([start, start + 1], dim=-1)


def _midpoint(edges_T2: Tensor) -> Tensor:
    return (edges_T2[:, 0] + edges_T2[:, 1]) / 2.0
