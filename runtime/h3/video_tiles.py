"""Where the video VAE cuts and how it joins again: spatial tiles, temporal chunks, blends.

Contract 6.5 and 6.7. Tails are taken from the raw tiles and cloned: a tail outlives the next
decoder call, and a decoder may reuse its output memory (CUDA graphs, preallocated canvases).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.h3.sizes import FRAMES_PER_CLIP, FRAMES_PER_LATENT, LATENTS_PER_CLIP, num_frames

TILE_SIZE = 256  # pixels; a constant of the model: another size gives other pictures
TILE_OVERLAP = 64  # pixels, the least two neighbours share
PIXELS_PER_TOKEN = 16
# A token of the decoder is a latent.
FRAMES_PER_TOKEN, CLIP_FRAMES, CLIP_TOKENS = FRAMES_PER_LATENT, FRAMES_PER_CLIP, LATENTS_PER_CLIP
DROPPED_TOKENS = 3  # the encoder's last latents, which saw only padding
OVERLAP_TOKENS = 2  # a decoder chunk sees the first two latents of the next one
OVERLAP_FRAMES = 5  # 2 * 4 - 3, the frames two chunks share (not 9: contract 6.7)
LEADING_FRAMES = 3  # 17 frames in 5 latents: the first 3 of every 20 raw frames do not exist

Tap = Callable[[str, Tensor], None]  # name as in the goldens, a clone


def tapped(on_tap: Tap | None, name: str, x: Tensor) -> None:
    """Hand a clone to the tap: the model goes on writing into its tensors."""
    if on_tap is not None:
        on_tap(name, x.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Tiles of one axis in pixels: `overlaps[i]` is shared by tiles i and i + 1."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    overlaps: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts)


def whole(length: int) -> Split:
    """The axis as one tile, whatever its length (parity of the untiled golden only)."""
    return Split(starts=(0,), sizes=(length,), overlaps=())


def split(length: int) -> Split:
    """Tiles of `length` pixels (a multiple of 16): 256 wide, overlaps from 64 up in units of 16."""
    if length <= TILE_SIZE:
        return whole(length)
    num_tiles = -(-length // TILE_SIZE)
    while TILE_SIZE * num_tiles - TILE_OVERLAP * (num_tiles - 1) < length:
        num_tiles += 1
    overlaps = [TILE_OVERLAP] * (num_tiles - 1)
    slack = TILE_SIZE * num_tiles - sum(overlaps) - length
    for unit in range(slack // PIXELS_PER_TOKEN):  # round-robin
        overlaps[unit % len(overlaps)] += PIXELS_PER_TOKEN
    starts = [0]
    for overlap in overlaps:
        starts.append(starts[-1] + TILE_SIZE - overlap)
    return Split(
        starts=tuple(starts), sizes=(TILE_SIZE,) * num_tiles, overlaps=tuple(overlaps)
    )  # fmt: skip


def blend(a: Tensor, b: Tensor, extent: int, dim: int) -> Tensor:
    """`b` with its first `extent` lines faded in from the last lines of `a`; the first equals a's.

    A new tensor in b's dtype; neither operand is written (contract 6.5).
    """
    extent = min(extent, a.shape[dim], b.shape[dim])
    shape = [1] * b.dim()
    shape[dim] = extent
    weight_b = torch.arange(extent, device=b.device, dtype=b.dtype).view(shape) / extent
    tail = a.narrow(dim, a.shape[dim] - extent, extent)
    head = b.narrow(dim, 0, extent)
    faded = tail * (1 - weight_b) + head * weight_b
    return torch.cat((faded, b.narrow(dim, extent, b.shape[dim] - extent)), dim=dim)


def join_tiles(
    tile: Callable[[slice, slice], Tensor], rows: Split, columns: Split, unit: int
) -> Tensor:
    """All tiles of one clip, blended into one canvas [B,C,T,H/unit,W/unit].

    tile: (rows, columns) in pixels -> raw tile [B,C,T,h,w]; called row by row. unit: pixels per
    output line, 1 for pictures, 16 for latents. Neighbours blended in are raw, above before left.
    """
    if len(rows) == len(columns) == 1:
        return tile(slice(0, rows.sizes[0]), slice(0, columns.sizes[0]))
    height, width = ((s.starts[-1] + s.sizes[-1]) // unit for s in (rows, columns))
    canvas: Tensor | None = None
    above: dict[int, Tensor] = {}
    for i, top in enumerate(rows.starts):
        left: Tensor | None = None
        for j, start in enumerate(columns.starts):
            raw = tile(slice(top, top + rows.sizes[i]), slice(start, start + columns.sizes[j]))
            part = raw
            if i > 0:
                part = blend(above[j], part, rows.overlaps[i - 1] // unit, -2)
            if left is not None:
                part = blend(left, part, columns.overlaps[j - 1] // unit, -1)
            if i + 1 < len(rows):
                overlap = rows.overlaps[i] // unit
                above[j] = raw[..., -overlap:, :].clone()
                part = part[..., :-overlap, :]
            if j + 1 < len(columns):
                overlap = columns.overlaps[j] // unit
                left = raw[..., -overlap:].clone()
                part = part[..., :-overlap]
            if canvas is None:
                canvas = raw.new_empty((*raw.shape[:-2], height, width))
            y, x = top // unit, start // unit
            canvas[..., y : y + part.shape[-2], x : x + part.shape[-1]] = part
    assert canvas is not None
    return canvas


def num_padding_tokens(num_tokens: int) -> int:
    """How often the last latent is repeated at the end: whole chunks come out, at least one."""
    padding = -(num_tokens + DROPPED_TOKENS) % CLIP_TOKENS
    if (num_tokens + DROPPED_TOKENS + padding) // CLIP_TOKENS < 2:
        padding += CLIP_TOKENS
    return padding


def num_chunks(num_tokens: int) -> int:
    """Decoder clips of 7 latents that `num_tokens` latents need (1 latent: one clip of its own)."""
    if num_tokens == 1:
        return 1
    padded = num_tokens + DROPPED_TOKENS + num_padding_tokens(num_tokens)
    return padded // CLIP_TOKENS - 1


def join_clips(
    decode: Callable[[int, int], Tensor], num_tokens: int, on_tap: Tap | None = None
) -> Iterator[Tensor]:
    """Raw pixels [B,3,n,H,W] of `num_tokens` latents in order: 17 frames per chunk, then the rest.

    decode: (first latent, latents) -> raw clip [B,3,4*latents,H,W]. Each head's first 5 frames are
    faded in from the tail before; frames that came from padding are cut (contract 6.5).
    """
    if num_tokens == 1:
        yield decode(0, 1)[:, :, LEADING_FRAMES:]
        return
    left = num_frames(num_tokens)
    tail: Tensor | None = None
    for i in range(num_chunks(num_tokens)):
        raw = decode(i * CLIP_TOKENS, CLIP_TOKENS + OVERLAP_TOKENS)
        head = raw[:, :, LEADING_FRAMES : LEADING_FRAMES + CLIP_FRAMES]
        if tail is not None:
            head = _faded(tail, head, f"join_{i - 1}", on_tap)
        # cloned: the next decode may write into the memory of this one
        tail = raw[:, :, raw.shape[2] - OVERLAP_FRAMES :].clone()
        yield head[:, :, :left]
        left -= min(left, CLIP_FRAMES)
    if left:
        assert tail is not None
        yield tail[:, :, :left]


def _faded(tail: Tensor, head: Tensor, name: str, on_tap: Tap | None) -> Tensor:
    tapped(on_tap, f"{name}/prev_tail", tail)
    tapped(on_tap, f"{name}/next_head", head[:, :, :OVERLAP_FRAMES])
    faded = blend(tail, head, OVERLAP_FRAMES, -3)
    tapped(on_tap, f"{name}/blended", faded[:, :, :OVERLAP_FRAMES])
    return faded
