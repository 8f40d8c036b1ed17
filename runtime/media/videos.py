"""Reference videos: upright 8-bit RGB frames at a constant rate, no more than needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from av.codec.context import CodecContext
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from runtime.media.colour import ToRGB, rgb_converter
from runtime.media.containers import (
    DECODE_TIMEOUT_SECONDS,
    MAX_VIDEO_SECONDS,
    Deadline,
    check_duration,
    check_pixels,
    intact_packets,
    open_media,
    picture_stream,
    stream_seconds,
)
from runtime.media.images import BACKGROUND, Alpha, Colour

Resize = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]

_ALMOST = 0.002  # 23.976 counts as 24: each frame is kept, time moves by 0.1 %
_GRID_SECONDS = 1e-6  # a frame due exactly on the grid counts as there


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVideo:
    """frames: uint8 [H,W,3] each, all of one size, at the asked rate; repeated ones are shared."""

    frames: tuple[NDArray[np.uint8], ...]
    start_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVideo:
    """frames: uint8 [F,H,W,3] sRGB at the asked rate; start_seconds: time of the first one."""

    frames: NDArray[np.uint8]
    start_seconds: float
    notes: tuple[str, ...]

    def pixels(self) -> NDArray[np.float32]:
        """float32 [F,H,W,3] in [0,1]; four times the memory, so made only on demand."""
        return np.divide(self.frames, np.float32(255), dtype=np.float32)


def as_stored(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The resize of load_video that keeps the size."""
    return frame_HWC


def load_video(
    path: Path,
    *,
    max_frames: int,
    fps: int = 24,
    resize: Resize = as_stored,
    alpha: Alpha = "composite",
    background: Colour = BACKGROUND,
    timeout_seconds: float = DECODE_TIMEOUT_SECONDS,
) -> LoadedVideo:
    """read_video with its frames in one array [F,H,W,3]."""
    read = read_video(
        path,
        max_frames=max_frames,
        fps=fps,
        resize=resize,
        alpha=alpha,
        background=background,
        timeout_seconds=timeout_seconds,
    )
    return LoadedVideo(
        frames=np.stack(read.frames), start_seconds=read.start_seconds, notes=read.notes
    )


def read_video(
    path: Path,
    *,
    max_frames: int,
    fps: int = 24,
    resize: Resize = as_stored,
    alpha: Alpha = "composite",
    background: Colour = BACKGROUND,
    timeout_seconds: float = DECODE_TIMEOUT_SECONDS,
) -> ReadVideo:
    """Reads the first `max_frames` frames of a video, resampled by timestamp to `fps`.

    Output frame n is the last source frame shown at n/fps, for n < duration*fps. Decoding stops
    once it has them; `resize` (uint8 [H,W,3] in and out) runs per frame, so that a large source is
    never held. Whatever was changed (rotation, rate, HDR, alpha...) is told in `notes`.
    Raises ValueError for what is not a video, is damaged, is over the caps of containers.py, or
    takes longer than `timeout_seconds`.
    """
    deadline = Deadline(path, timeout_seconds)
    with open_media(path) as container:
        stream = picture_stream(container)
        if stream is None:
            raise ValueError(f"{path} has no moving pictures; give a video file")
        _check_header(path, container, stream)
        notes: list[str] = []
        sampler = _Sampler(stream, fps, max_frames)
        for frame in _decode(path, container, stream, deadline):
            if not sampler.started:
                convert = _converter(path, frame, stream, resize, alpha, background, notes)
                sampler.start(convert)
            if not sampler.add(frame):
                break
        frames = sampler.finish(path)
    notes += sampler.notes(stream)
    if any(frame.shape != frames[0].shape for frame in frames):
        raise ValueError(f"{path} changes its picture size midway; export it at one size")
    return ReadVideo(frames=tuple(frames), start_seconds=sampler.first_seconds, notes=tuple(notes))


def square_width(stream: VideoStream) -> int:
    """Stored width once non-square pixels are squared; the height stays."""
    aspect = float(stream.sample_aspect_ratio or 1)
    if not 0.25 <= aspect <= 4:  # a broken tag
        return stream.width
    return max(1, round(stream.width * aspect))


def first_frame(path: Path, container: InputContainer, stream: VideoStream) -> VideoFrame:
    """Decodes the first frame only; ValueError when there is none."""
    for frame in _decode(path, container, stream, Deadline(path, DECODE_TIMEOUT_SECONDS)):
        return frame
    raise ValueError(f"no picture can be decoded from {path}; give another video")


def _check_header(path: Path, container: InputContainer, stream: VideoStream) -> None:
    if stream.codec_context is None:
        raise ValueError(f"{path} has a video codec that is not supported; export it as H.264")
    check_pixels(path, stream)
    check_duration(path, stream_seconds(container, stream), MAX_VIDEO_SECONDS)


def _decoder(stream: VideoStream) -> VideoCodecContext:
    """VP8/VP9 keep alpha in a side stream that only libvpx decodes."""
    name = stream.codec_context.name
    tags = {key.lower(): value for key, value in stream.metadata.items()}
    if tags.get("alpha_mode") == "1" and name in ("vp8", "vp9"):
        context = CodecContext.create({"vp8": "libvpx", "vp9": "libvpx-vp9"}[name], "r")
        assert isinstance(context, VideoCodecContext)
        return context
    stream.thread_type = "AUTO"
    return stream.codec_context


def _decode(
    path: Path, container: InputContainer, stream: VideoStream, deadline: Deadline
) -> Iterator[VideoFrame]:
    decoder = _decoder(stream)
    for packet in intact_packets(path, container, stream):
        deadline.check()
        for frame in decoder.decode(packet):
            deadline.check()
            yield frame


def _converter(
    path: Path,
    frame: VideoFrame,
    stream: VideoStream,
    resize: Resize,
    alpha: Alpha,
    background: Colour,
    notes: list[str],
) -> ToRGB:
    if stream.codec_context.codec_tag in ("dvh1", "dvhe", "dav1") and int(frame.color_trc) == 2:
        raise ValueError(
            f"the video {path} is Dolby Vision without a plain HDR layer (profile 5), whose "
            f"colours cannot be converted; export it as H.264"
        )
    width = square_width(stream)
    if width != stream.width:
        notes.append(f"non-square pixels squared, {stream.width} -> {width} columns")
    if frame.interlaced_frame:
        notes.append("interlaced video used without deinterlacing")
    try:
        to_rgb = rgb_converter(frame, alpha, background, width, notes)
    except ValueError as error:
        raise ValueError(f"the video {path} cannot be used: {error}") from error

    def converted(next_frame: VideoFrame) -> NDArray[np.uint8]:
        upright = to_rgb(next_frame)
        resized = resize(upright)
        if next_frame is frame and resized.shape != upright.shape:
            (height, width), (high, wide) = upright.shape[:2], resized.shape[:2]
            notes.append(f"{width}x{height} -> {wide}x{high} pixels")
        return resized

    return converted


class _Sampler:
    """Picks frames onto the grid n/fps as they are decoded; converts only what is picked."""

    def __init__(self, stream: VideoStream, fps: int, max_frames: int) -> None:
        self._fps, self._max_frames = fps, max_frames
        self._rate = float(stream.average_rate or stream.guessed_rate or fps)
        constant = stream.base_rate == stream.average_rate
        self._almost = constant and 0 < abs(self._rate / fps - 1) < _ALMOST
        self._stretch = self._rate / fps if self._almost else 1.0
        self._tick = float(stream.time_base) if stream.time_base else 0.0
        # Containers round timestamps to their tick (1 ms in mkv): a frame may be due a bit early.
        self._slack = min(self._tick, 0.25 / fps)
        self._grid = _GRID_SECONDS + self._slack / 2
        self._picked: list[NDArray[np.uint8]] = []
        self._times: list[float] = []
        self._pending: VideoFrame | None = None
        self._pending_rgb: NDArray[np.uint8] | None = None
        self._sources = 0
        self._full = False
        self._convert: ToRGB | None = None
        self.first_seconds = 0.0

    @property
    def started(self) -> bool:
        return self._convert is not None

    def start(self, convert: ToRGB) -> None:
        self._convert = convert

    def add(self, frame: VideoFrame) -> bool:
        """Takes the next decoded frame; False once no more are needed."""
        seconds = self._seconds(frame)
        if self._times and seconds <= self._times[-1]:
            return True  # a timestamp that does not advance is never on show
        self._pick_until(seconds)
        self._full = len(self._picked) >= self._max_frames
        if self._full:
            return False
        self._times.append(seconds)
        self._pending, self._pending_rgb = frame, None
        return True

    def finish(self, path: Path) -> list[NDArray[np.uint8]]:
        """The picked frames; the last source frame is held for its own duration."""
        if self._pending is None:
            raise ValueError(f"no picture can be decoded from {path}; give another video")
        if not self._full:
            end = self._times[-1] + self._last_seconds(self._pending)
            total = min(self._max_frames, int((end + self._slack + _GRID_SECONDS) * self._fps))
            self._pick_until(float("inf"), total)
            del self._picked[total:]
        if not self._picked:
            raise ValueError(
                f"the video {path} is shorter than one frame at {self._fps} fps; give a longer one"
            )
        return self._picked

    def notes(self, stream: VideoStream) -> list[str]:
        """What resampling and cutting did."""
        notes = []
        gaps = np.diff(self._times)
        variable = len(gaps) > 1 and gaps.max() > 1.5 * gaps.min() + 2 * self._tick
        used = self._sources if self._full else len(self._times)
        took = f"{used} -> {len(self._picked)} frames"
        if self._almost:
            notes.append(f"{self._rate:.6g} fps -> {self._fps} fps, each frame kept")
        elif variable:
            notes.append(
                f"variable frame rate ({1 / gaps.mean():.4g} fps on average) -> "
                f"{self._fps} fps, {took}"
            )
        elif len(gaps) and abs(self._rate / self._fps - 1) > 1e-6:
            notes.append(f"{self._rate:.4g} fps -> {self._fps} fps, {took}")
        if self._full:
            of = f" of {stream.frames}" if stream.frames else ""
            notes.append(f"first {self._sources}{of} source frames used, the rest cut")
        return notes

    def _seconds(self, frame: VideoFrame) -> float:
        """Time since the first frame, on the output's clock."""
        if frame.pts is None:
            return self._times[-1] + 1 / self._rate if self._times else 0.0
        absolute = frame.pts * self._tick
        if not self._times:
            self.first_seconds = absolute
        return (absolute - self.first_seconds) * self._stretch

    def _last_seconds(self, frame: VideoFrame) -> float:
        if frame.duration:
            return frame.duration * self._tick * self._stretch
        gaps = np.diff(self._times)
        return float(np.median(gaps)) if len(gaps) else 1 / self._rate

    def _pick_until(self, seconds: float, most: int | None = None) -> None:
        """Repeats the pending frame for every grid point before `seconds`."""
        most = self._max_frames if most is None else most
        if self._pending is None:
            return
        while len(self._picked) < most and len(self._picked) / self._fps + self._grid < seconds:
            if self._pending_rgb is None:
                assert self._convert is not None
                self._pending_rgb = self._convert(self._pending)
                self._sources = len(self._times)
            self._picked.append(self._pending_rgb)
