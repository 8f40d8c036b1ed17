"""The packed sequence: which rows exist, where they lie in time and space (contract 1.5-1.8).

Torch-free (numpy float64), so that preflight can count rows without loading the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.h3.sizes import (
    AUDIO_LATENTS_PER_SECOND,
    PIXELS_PER_LATENT,
    audio_latents_of_frames,
    latent_frames,
    num_frames,
)
from runtime.media.latents import LatentsForm, Shape, end_together
from runtime.messages import FPS, Ref2VARequest

FRAME_PER_TOKEN = (1, 4, 4, 4, 4)  # video frames that latent frame k covers, cyclic
FRAME_RESCALE = 5 / 3  # audio latents (40 Hz) per video frame (24 fps)
GRID_SCALE = 32

SegmentKind = Literal["text", "cond", "cond_audio", "ref_img", "ref_audio", "audio", "video"]
VIDEO_KINDS = ("cond", "ref_img", "video")
AUDIO_KINDS = ("cond_audio", "ref_audio", "audio")


def _apart(video: Shape, audio: Shape) -> str:
    """How sound and pictures of these latents do not end together, "" where they do."""
    frames, latents = num_frames(video[2]), audio[3]
    shown, heard = frames / FPS, latents / AUDIO_LATENTS_PER_SECOND
    if end_together(heard, shown, FPS):
        return ""
    return (
        f"{latents} latents of sound, which last {heard:.3f} s, and {video[2]} of video, which "
        f"last {shown:.3f} s and go with {audio_latents_of_frames(frames)} of sound"
    )


LATENTS = LatentsForm(
    video=(1, 24, 0, 0, 0),
    audio=(1, 32, 2, 0),
    words=("[1,24,T,h,w]", "[1,32,2,Ta]"),
    key="h3_request",
    apart=_apart,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows [start, stop) of one kind."""

    start: int
    stop: int
    kind: SegmentKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Latent sizes of one reference block; zeros where a stream is absent."""

    kind: Literal["image", "audio", "video", "video_audio"]
    latent_t: int = 1
    latent_h: int = 0
    latent_w: int = 0
    audio_t: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyframeShape:
    """A guide at a target frame: video latents on the target grid, and/or audio latents."""

    frame_index: int
    latent_t: int = 0
    audio_t: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """Latent sizes of what is generated: [24, t, h, w] video and [32, 2, audio_t] audio."""

    latent_t: int
    latent_h: int
    latent_w: int
    audio_t: int


def target_of(request: Ref2VARequest) -> TargetShape:
    """The latents that are generated."""
    return TargetShape(
        latent_t=latent_frames(request.frames),
        latent_h=request.height // PIXELS_PER_LATENT,
        latent_w=request.width // PIXELS_PER_LATENT,
        audio_t=audio_latents_of_frames(request.frames),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """All rows of one request. positions_S3 is float64 (t, h, w); never padded."""

    segments: tuple[Segment, ...]
    positions_S3: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        return len(self.positions_S3)

    def rows_of(self, kinds: Sequence[str]) -> NDArray[np.int64]:
        """Row indices of these kinds, in segment order."""
        spans = [np.arange(s.start, s.stop) for s in self.segments if s.kind in kinds]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def is_target(self, kinds: Sequence[str]) -> NDArray[np.bool_]:
        """For each row of rows_of(kinds): is it generated (and not a condition)?"""
        spans = [
            np.full(s.stop - s.start, s.kind in ("audio", "video"))
            for s in self.segments
            if s.kind in kinds
        ]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.bool_)


def even(size: int) -> int:
    """Latent sides are padded (circularly) to even before patching."""
    return size + size % 2


def pack(
    *,
    text_len: int,
    target: TargetShape,
    references: Sequence[BlockShape] = (),
    keyframes: Sequence[KeyframeShape] = (),
) -> PackedLayout:
    """Text, keyframes, references, target audio, target video: rows, kinds and positions."""
    rows = _Rows()
    rows.add("text", _text(text_len))
    target_h, target_w = _grid_axes(target.latent_h, target.latent_w)
    target_pins = (target_w[0], target_w[-1])
    origin = float(text_len) + _span_total(references)
    for keyframe in keyframes:  # stored before the references, timed after them
        start = origin + FRAME_RESCALE * keyframe.frame_index
        if keyframe.latent_t:
            rows.add("cond", _video(start, keyframe.latent_t, target_h, target_w))
        if keyframe.audio_t:
            rows.add("cond_audio", _audio(start, keyframe.audio_t, target_pins))
    cursor = float(text_len)
    for block in references:
        _add_block(rows, block, cursor, target_pins)
        cursor += _span(block)
    rows.add("audio", _audio(origin, target.audio_t, target_pins))
    rows.add("video", _video(origin, target.latent_t, target_h, target_w))
    return PackedLayout(segments=tuple(rows.segments), positions_S3=np.concatenate(rows.positions))


class _Rows:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.positions: list[NDArray[np.float64]] = []
        self._next = 0

    def add(self, kind: SegmentKind, positions: NDArray[np.float64]) -> None:
        if not len(positions):
            return
        stop = self._next + len(positions)
        self.segments.append(Segment(start=self._next, stop=stop, kind=kind))
        self.positions.append(positions)
        self._next = stop


def _add_block(
    rows: _Rows, block: BlockShape, cursor: float, target_pins: tuple[float, float]
) -> None:
    if block.kind == "audio":
        rows.add("ref_audio", _audio(cursor, block.audio_t, target_pins))
        return
    grid_h, grid_w = _grid_axes(block.latent_h, block.latent_w)
    if block.kind == "image":
        frame = _frame(grid_h, grid_w)
        rows.add("ref_img", np.column_stack([np.full(len(frame), cursor), frame]))
        return
    # A soundtrack is pinned to its own picture's width, not the target's.
    rows.add("ref_audio", _audio(cursor, block.audio_t, (grid_w[0], grid_w[-1])))
    rows.add("ref_img", _video(cursor, block.latent_t, grid_h, grid_w))


def _span(block: BlockShape) -> float:
    if block.kind == "image":
        return 1.0
    if block.kind == "audio":
        return float(block.audio_t)
    total = 0.0  # a plain running sum: Python >= 3.12's sum() compensates and differs by an ulp
    for span in _frame_spans(block.latent_t):
        total += span
    return max(float(block.audio_t), total)


def _span_total(references: Sequence[BlockShape]) -> float:
    total = 0.0
    for block in references:
        total += _span(block)
    return total


def _frame_spans(latent_t: int) -> list[float]:
    return [FRAME_RESCALE * FRAME_PER_TOKEN[k % 5] for k in range(latent_t)]


def _text(length: int) -> NDArray[np.float64]:
    positions = np.zeros((length, 3), dtype=np.float64)
    positions[:, 0] = np.arange(length)
    return positions


def _grid_axes(latent_h: int, latent_w: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    latent_h, latent_w = even(latent_h), even(latent_w)
    side = math.sqrt(latent_h * latent_w)

    def axis(latent: int) -> NDArray[np.float64]:
        n, ratio = latent // 2, latent / side
        return (np.arange(n, dtype=np.float64) * (ratio / n) + (1 - ratio) / 2) * GRID_SCALE

    return axis(latent_h), axis(latent_w)


def _frame(grid_h: NDArray[np.float64], grid_w: NDArray[np.float64]) -> NDArray[np.float64]:
    h, w = np.meshgrid(grid_h, grid_w, indexing="ij")
    return np.column_stack([h.ravel(), w.ravel()])


def _video(
    origin: float, latent_t: int, grid_h: NDArray[np.float64], grid_w: NDArray[np.float64]
) -> NDArray[np.float64]:
    spans = np.array(_frame_spans(latent_t), dtype=np.float64)
    times = np.concatenate([[0.0], np.cumsum(spans)[:-1]]) + origin
    frame = _frame(grid_h, grid_w)
    t = np.repeat(times, len(frame))
    return np.column_stack([t, np.tile(frame, (latent_t, 1))])


def _audio(origin: float, audio_t: int, pins: tuple[float, float]) -> NDArray[np.float64]:
    positions = np.zeros((2 * audio_t, 3), dtype=np.float64)
    positions[:, 0] = np.tile(origin + np.arange(audio_t), 2)
    positions[:audio_t, 2], positions[audio_t:, 2] = pins
    return positions
