"""Latents to frames: batches of tiles through the decoder, joined, and sent to the host.

Axes: B tiles of a batch, C channels, F frames, H height, W width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.h3.video_ranks import Conductor, Timed, help_out
from runtime.h3.video_tiles import (
    CLIP_TOKENS,
    OVERLAP_TOKENS,
    PIXELS_PER_TOKEN,
    Split,
    Tap,
    join_clips,
    join_tiles,
    num_chunks,
    tapped,
)
from runtime.nonfinite import NonFinite
from runtime.team import Team

DECODE_STAGE = "video VAE decode"
CHUNKS_AHEAD = 1  # on a GPU: launched before the chunk before them is waited for
BYTE_MAX = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """How a decode reports and stops; on_tile(done, total) follows each tile's decoder call."""

    cancelled: Callable[[], bool]
    on_tile: Callable[[int, int], None]
    on_tap: Tap | None


class _Place(NamedTuple):
    """One tile: latents [start, start + tokens), and its pixels."""

    start: int
    tokens: int
    rows: slice
    columns: slice

    def of(self, z: Tensor) -> Tensor:
        return z[
            :, :, self.start : self.start + self.tokens, _tokens(self.rows), _tokens(self.columns)
        ]


class RawClips:
    """Decodes the tiles of all clips in the order of their joins, `at_once` of them in one batch.

    decode_tiles: latents [B,24,t,h,w] -> raw tiles [B,3,4t,16h,16w]; on_tap gets its modules.
    """

    def __init__(
        self,
        decode_tiles: Callable[[Tensor, Tap | None], Tensor],
        z: Tensor,
        num_tokens: int,
        *,
        cut: Callable[[int], Split],
        at_once: int,
        watch: Watch,
        conductor: Conductor | None = None,
    ) -> None:
        """conductor: of the ranks that decode with this one."""
        self._decode_tiles, self._z, self._watch = decode_tiles, z, watch
        self._rows = cut(z.shape[3] * PIXELS_PER_TOKEN)
        self._columns = cut(z.shape[4] * PIXELS_PER_TOKEN)
        self._at_once = at_once
        self._num_tokens = num_tokens
        self._conductor = conductor
        places = self._places()
        self._batches = [places[i : i + at_once] for i in range(0, len(places), at_once)]
        self._raw = self._tiles()

    def joined(self) -> Iterator[Tensor]:
        """Raw pixels [1,3,n,H,W] in order; see `join_clips`."""
        return join_clips(self._clip, self._num_tokens, self._watch.on_tap)

    def _clip(self, start: int, num_tokens: int) -> Tensor:
        del start, num_tokens  # the clips come in the order of `_places`
        return join_tiles(lambda y, x: next(self._raw), self._rows, self._columns, 1)

    def _places(self) -> list[_Place]:
        tokens = 1 if self._num_tokens == 1 else CLIP_TOKENS + OVERLAP_TOKENS
        return [
            _Place(clip * CLIP_TOKENS, tokens, rows, columns)
            for clip in range(num_chunks(self._num_tokens))
            for rows in _slices(self._rows)
            for columns in _slices(self._columns)
        ]

    def help_out(self, team: Team, timed: Timed) -> None:
        """As another rank than 0: decodes its share of the batches for rank 0, which joins them."""
        help_out(team, len(self._batches), self._decoded, timed)

    def _tiles(self) -> Iterator[Tensor]:
        if self._conductor is None:
            batches: Iterator[Tensor] = map(self._batch, range(len(self._batches)))
        else:
            sizes = [len(batch) for batch in self._batches]
            batches = self._conductor.batches(sizes, self._decoded, self._stop_if_cancelled)
        total, done = sum(map(len, self._batches)), 0
        # no name of a batch of its own: it would keep one alive while the next one is decoded
        for tiles in map(_split, batches):
            for tile in tiles:
                tapped(self._watch.on_tap, f"clip_{done}/pixels_raw", tile)
                done += 1
                self._watch.on_tile(done, total)
            yield from tiles
            del tiles, tile

    def _batch(self, number: int) -> Tensor:
        self._stop_if_cancelled()
        return self._decoded(number)

    def _stop_if_cancelled(self) -> None:
        if self._watch.cancelled():
            raise Cancelled

    def _decoded(self, number: int) -> Tensor:
        watch = self._watch
        parts = [place.of(self._z) for place in self._batches[number]]
        for i, part in enumerate(parts):
            tapped(watch.on_tap, f"clip_{number * self._at_once + i}/z", part)
        z = parts[0] if len(parts) == 1 else torch.cat(parts)
        # the goldens' modules are of the first tile
        return self._decode_tiles(z, _first(watch.on_tap) if number == 0 else None)


def _split(batch: Tensor) -> tuple[Tensor, ...]:
    return batch.split(1)


def _first(on_tap: Tap | None) -> Tap | None:
    return None if on_tap is None else lambda name, x: on_tap(name, x[:1])


def _slices(axis: Split) -> list[slice]:
    return [slice(start, start + size) for start, size in zip(axis.starts, axis.sizes, strict=True)]


def _tokens(pixels: slice) -> slice:
    return slice(pixels.start // PIXELS_PER_TOKEN, pixels.stop // PIXELS_PER_TOKEN)


# ---- to the host


class Chunk:
    """Frames on their way to the host; the finite check travels with them."""

    def __init__(self, frames: Tensor, finite: Tensor) -> None:
        """frames [n,H,W,3], finite a single bool, both on the decoder's device."""
        self._finite = finite
        self._arrived: torch.cuda.Event | None = None
        if frames.device.type == "cuda" and frames.dtype == torch.uint8:
            # floats stay pageable: a whole clip of them may be held, and pinned memory is scarce
            self._frames, self._finite = _pinned(frames), _pinned(finite)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._frames = frames.cpu()

    def wait(self) -> Tensor:
        """The frames on the CPU, once they are there; NonFinite if the raw pixels were not."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if not bool(self._finite):
            raise NonFinite(DECODE_STAGE, "raw pixels")
        return self._frames


def _pinned(x: Tensor) -> Tensor:
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return there.copy_(x, non_blocking=True)


def in_flight(
    raw: Iterator[Tensor], start: Callable[[Tensor], Chunk], ahead: int
) -> Iterator[Tensor]:
    """The chunks that `start` makes of raw pixels, in order, each waited for `ahead` starts later.

    So a GPU has work while the host waits for a chunk. At most ahead + 1 chunks are alive here.
    """
    started: deque[Chunk] = deque()
    for pixels in raw:
        started.append(start(pixels))
        del pixels
        if len(started) > ahead:
            yield started.popleft().wait()
    while started:
        yield started.popleft().wait()


def to_bytes(frames: Tensor) -> Tensor:
    """Floats in [0,1] to uint8, rounded half up: the bits of runtime/media/mp4.py's own rounding.

    Writes into `frames`; three kernels, because each operation must round.
    """
    return frames.mul_(BYTE_MAX).add_(0.5).to(torch.uint8)
