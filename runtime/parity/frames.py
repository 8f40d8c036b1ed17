"""Frames of two runs, read one at a time and measured; which of them a temporal join made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.h3.video_tiles import CLIP_FRAMES, OVERLAP_FRAMES
from runtime.media.frames import read_frame
from runtime.media.images import load_image

Frame = NDArray[np.float32]  # [H,W,3], values in [0,1]

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How far one frame, or several, are apart; all zero and psnr infinite when equal."""

    equal: bool
    max_abs: float
    mean_abs: float
    relative_l2: float  # over the norm of A
    psnr: float  # dB, peak 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What figures are made of; those of several frames can be added up."""

    equal: bool
    max_abs: float
    values: int
    absolute: float
    squares: float
    norm: float  # of squares of A

    def figures(self) -> Figures:
        """Over every value that was summed (at least one)."""
        error = self.squares / self.values
        relative = math.sqrt(self.squares / self.norm) if self.norm > 0 else math.inf
        return Figures(
            equal=self.equal,
            max_abs=self.max_abs,
            mean_abs=self.absolute / self.values,
            relative_l2=relative if self.squares > 0 else 0.0,
            psnr=-10 * math.log10(error) if error > 0 else math.inf,
        )


def measured(a: Frame, b: Frame) -> Sums:
    """Two frames of one shape; a value that is not finite in either makes the figures infinite."""
    equal = np.array_equal(a.view(np.uint32), b.view(np.uint32))
    wide = a.astype(np.float64)
    difference = np.abs(wide - b)
    if not equal and not np.isfinite(difference).all():
        difference = np.full(1, math.inf)
    return Sums(
        equal=equal,
        max_abs=0.0 if equal else float(difference.max()),
        values=a.size,
        absolute=0.0 if equal else float(difference.sum()),
        squares=0.0 if equal else float(np.square(difference).sum()),
        norm=float(np.square(wide).sum()),
    )


def added(parts: Sequence[Sums]) -> Sums:
    """Several frames as one."""
    return Sums(
        equal=all(p.equal for p in parts),
        max_abs=max(p.max_abs for p in parts),
        values=sum(p.values for p in parts),
        absolute=sum(p.absolute for p in parts),
        squares=sum(p.squares for p in parts),
        norm=sum(p.norm for p in parts),
    )


def join_of(frame: int, total: int) -> int | None:
    """The first frame of the temporal join that `frame` belongs to, None outside of joins.

    The decoder blends 5 frames at 17, 34, 51 ...; the last clip's own 5 frames are not blended.
    """
    start = frame // CLIP_FRAMES * CLIP_FRAMES
    blended = start > 0 and start + OVERLAP_FRAMES < total
    return start if blended and frame - start < OVERLAP_FRAMES else None


class Folder:
    """A folder of float frames (.npy) or of pictures (.png), in the order of their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(p for p in path.iterdir() if p.suffix.lower() in (".npy", ".png"))
        kinds = {p.suffix.lower() for p in files}
        if len(kinds) != 1:
            raise ValueError(
                f"{path} holds {' and '.join(sorted(kinds)) or 'no'} frames; give a folder of .npy "
                "frames, or of .png frames"
            )
        self.files = files
        self.warning = ""
        if kinds == {".png"}:
            self.warning = f"{path} holds 8-bit pictures: what is below 1/255 is lost"

    def frames(self) -> Iterator[Frame]:
        """One at a time."""
        for file in self.files:
            yield load_image(file).pixels[0] if file.suffix.lower() == ".png" else _array(file)


class Stored:
    """A pixel tensor [1,T,H,W,3] or [T,H,W,3] of a golden or a latents file."""

    warning = ""

    def __init__(self, path: Path, tensor: NDArray[Any]) -> None:
        self.path = path
        self._frames = tensor.reshape(-1, *tensor.shape[-3:])

    def frames(self) -> Iterator[Frame]:
        """Views of the tensor."""
        yield from np.ascontiguousarray(self._frames, dtype=np.float32)


class Video:
    """A compressed video, decoded frame by frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warning = (
            f"{path} is a compressed video: its figures say nothing about parity; compare float "
            "frames (generate --no-media)"
        )

    def frames(self) -> Iterator[Frame]:
        """As stored, without rotation: 8-bit RGB over 255."""
        # here: frames and latents are compared on machines without PyAV too
        from runtime.media.containers import open_media, picture_stream

        with open_media(self.path) as container:
            stream = picture_stream(container)
            if stream is None:
                raise ValueError(f"{self.path} has no moving pictures; give a video file")
            for frame in container.decode(stream):
                yield frame.to_ndarray(format="rgb24").astype(np.float32) / np.float32(255)


Source = Folder | Stored | Video


def pairs(a: Source, b: Source) -> Iterator[tuple[Frame, Frame]]:
    """Frames side by side; ValueError where one ends first or the sizes differ."""
    left, right = a.frames(), b.frames()
    for number, frame in enumerate(left):
        other = next(right, None)
        if other is None:
            raise ValueError(f"{b.path} ends after {number} frames, {a.path} goes on")
        if frame.shape != other.shape:
            raise ValueError(
                f"frame {number} is {_size(frame)} in {a.path} and {_size(other)} in {b.path}; "
                "frames of one size can be compared"
            )
        yield frame, other
    if next(right, None) is not None:
        raise ValueError(f"{a.path} has fewer frames than {b.path}; compare runs of one length")


def _array(file: Path) -> Frame:
    try:
        frame = read_frame(file)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file} is not a readable .npy frame ({error})") from error
    if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.float32:
        raise ValueError(
            f"{file} holds {frame.dtype} {list(frame.shape)}; a frame is float32 [H,W,3]"
        )
    return np.ascontiguousarray(frame)


def _size(frame: Frame) -> str:
    return f"{frame.shape[1]}x{frame.shape[0]}"
