"""The finished video: H.264 and AAC in an mp4 that plays in browsers, streamed and written whole.

Axes: N frames of one chunk, H rows, W columns, 3 colours; wave [2,L] samples, full scale +-1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from numpy.typing import ArrayLike, NDArray

from runtime.media.aside import Aside
from runtime.media.colour import SCALING
from runtime.media.containers import open_media
from runtime.media.files import atomic_file
from runtime.media.latents import end_together

AUDIO_RATES = (32_000, 48_000)
RUN_KEY = "h3_run"
WAITING_CHUNKS = 2  # for the encoder
_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_OPTIONS = {
    "movflags": "+faststart+use_metadata_tags",  # arbitrary keys survive only with the second
    "max_interleave_delta": "0",  # sound comes whole: packets wait for the pictures in memory
}

Wave = ArrayLike | Callable[[], ArrayLike]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mp4Options:
    """How the file is encoded. sample_rate: Hz of the wave; audio_rate: Hz in the file."""

    fps: int = 24
    sample_rate: int = 32_000
    audio_rate: int = 48_000
    crf: int = 16
    preset: str = "veryfast"
    audio_bit_rate: int = 192_000

    def __post_init__(self) -> None:
        if self.audio_rate not in AUDIO_RATES:
            raise ValueError(f"audio_rate must be 32000 or 48000 Hz, got {self.audio_rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMp4:
    """What was written; sound_seconds is 0.0 without sound.

    encoding_seconds: of the encoder's thread; exposed_seconds: what the caller waited for it.
    """

    path: Path
    frames: int
    video_seconds: float
    sound_seconds: float
    bytes: int
    encoding_seconds: float
    exposed_seconds: float
    notes: tuple[str, ...]


def keep_going() -> None:
    """The check_cancel of a caller that never cancels."""


def write_mp4(
    path: Path,
    frames: Iterable[ArrayLike],
    wave: Wave | None,
    metadata: Mapping[str, Any],
    options: Mp4Options,
    check_cancel: Callable[[], None] = keep_going,
    *,
    tags: Mapping[str, str] = _NO_TAGS,
) -> WrittenMp4:
    """Encodes chunks of frames as they come and writes `path` atomically.

    frames: yields uint8, or float32 in [0,1], [N,H,W,3] sRGB (CPU tensors or arrays), H and W even.
    They are encoded in a thread of their own: besides the one being encoded and the one just
    yielded WAITING_CHUNKS are alive, and only encoded packets are kept. wave: float32 [2,L] at
    options.sample_rate, or a function called for it after the first chunk; it must end within one
    frame of the pictures. metadata: a JSON object, stored under "h3_run" and "comment".
    tags: more of the file's tags, and a "comment" of their own in place of the JSON.
    check_cancel is called in this thread, at each chunk and while waiting, and raises to stop;
    then, and on any other failure, no file is left. Raises ValueError for bad input, naming the
    stage of values that are not finite, and DiskFullError.
    """
    text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    text.encode()  # a lone surrogate fails here, not after minutes of encoding
    with atomic_file(path) as part:
        with av.open(str(part), "w", format="mp4", options=dict(_OPTIONS)) as container:
            container.metadata[RUN_KEY] = text
            container.metadata["comment"] = text
            container.metadata.update(tags)
            with Aside("mp4", waiting=WAITING_CHUNKS, check_cancel=check_cancel) as encoder:
                writer = _Writer(container, options, encoder.stopped, with_sound=wave is not None)
                for i, chunk in enumerate(frames):
                    encoder.put(partial(writer.add_frames, chunk))
                    del chunk  # else it lives on while the next one is made
                    if i == 0 and wave is not None:
                        # early: encoding it takes long, and now frames are still to be made
                        sound = wave() if callable(wave) else wave
                        encoder.put(partial(writer.add_sound, sound))
                encoder.put(writer.finish)
                encoder.finish()
        size = part.stat().st_size
    return WrittenMp4(
        path=path,
        frames=writer.frames,
        video_seconds=writer.frames / options.fps,
        sound_seconds=writer.sound_samples / options.sample_rate,
        bytes=size,
        encoding_seconds=encoder.busy_seconds,
        exposed_seconds=encoder.waited_seconds,
        notes=tuple(writer.notes),
    )


def read_run_metadata(path: Path) -> dict[str, Any]:
    """The JSON object that write_mp4 stored; ValueError when the file has none."""
    with open_media(path) as container:
        tags = dict(container.metadata)
    text = tags.get(RUN_KEY) or tags.get("comment", "")
    try:
        stored = json.loads(text)
    except json.JSONDecodeError:
        stored = None
    if not isinstance(stored, dict):
        raise ValueError(
            f"{path} carries no run record; it was not written here, or a site stripped its tags"
        )
    return stored


class _Writer:
    """Two streams of one container; the first frame's size starts the video stream."""

    def __init__(
        self,
        container: OutputContainer,
        options: Mp4Options,
        stopped: Event,
        *,
        with_sound: bool,
    ) -> None:
        self._container, self._options, self._stopped = container, options, stopped
        self._with_sound = with_sound
        self._video: VideoStream | None = None
        self._audio: AudioStream | None = None
        self.frames = 0
        self.sound_samples = 0
        self.notes: list[str] = []

    def add_frames(self, chunk: ArrayLike) -> None:
        """Encodes uint8, or float32 in [0,1], [N,H,W,3] frame by frame until it is stopped."""
        frames_NHWC = np.asarray(chunk)
        known = frames_NHWC.dtype in (np.float32, np.uint8)
        if frames_NHWC.ndim != 4 or frames_NHWC.shape[3] != 3 or not known:
            raise ValueError(
                f"frames must be uint8 or float32 [N,H,W,3], "
                f"got {frames_NHWC.dtype} {frames_NHWC.shape}"
            )
        height, width = frames_NHWC.shape[1:3]
        video = self._video or self._start(width, height)
        if (width, height) != (video.width, video.height):
            raise ValueError(
                f"frame {self.frames} is {width}x{height}, the frames before are "
                f"{video.width}x{video.height}; all must have one size"
            )
        for frame_HWC in frames_NHWC:
            if self._stopped.is_set():
                return
            frame = _to_yuv420(self._rounded(frame_HWC))
            frame.pts, frame.time_base = self.frames, Fraction(1, self._options.fps)
            self._container.mux(video.encode(frame))
            self.frames += 1

    def add_sound(self, wave: ArrayLike) -> None:
        """Encodes float32 [2,L]; called once, after a first chunk of frames."""
        wave_CL = np.asarray(wave)
        if wave_CL.ndim != 2 or wave_CL.shape[0] != 2 or wave_CL.dtype != np.float32:
            raise ValueError(f"the wave must be float32 [2,L], got {wave_CL.dtype} {wave_CL.shape}")
        _check_finite(wave_CL, "audio VAE decode: the wave")
        if not wave_CL.shape[1]:
            return  # `finish` refuses it
        peak = float(np.abs(wave_CL).max())
        if peak > 1:
            self.notes.append(f"sound peaks at {peak:.2f}, clamped to 1.0")
            wave_CL = wave_CL.clip(-1, 1)
        self.sound_samples = wave_CL.shape[1]
        assert self._audio is not None
        for frame in self._at_file_rate(wave_CL):
            self._container.mux(self._audio.encode(frame))

    def finish(self) -> None:
        """Flushes both encoders; ValueError unless sound and pictures end together."""
        if self._video is None:
            raise ValueError("no frames were given to write; a video needs at least one")
        if self._with_sound:
            self._check_length(self.sound_samples)
        self._container.mux(self._video.encode(None))
        if self._audio is not None:
            self._container.mux(self._audio.encode(None))

    def _start(self, width: int, height: int) -> VideoStream:
        if width % 2 or height % 2 or not width or not height:
            raise ValueError(f"an mp4 needs even sizes (yuv420p), got {width}x{height}")
        options = self._options
        video = self._container.add_stream(
            "libx264", rate=options.fps, options={"crf": str(options.crf), "preset": options.preset}
        )
        assert isinstance(video, VideoStream)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        context = video.codec_context
        context.time_base = Fraction(1, options.fps)
        context.color_range = int(ColorRange.MPEG)
        context.colorspace = int(Colorspace.ITU709)
        context.color_primaries = int(ColorPrimaries.BT709)
        context.color_trc = int(ColorTrc.BT709)
        if self._with_sound:
            audio = self._container.add_stream("aac", rate=options.audio_rate, layout="stereo")
            assert isinstance(audio, AudioStream)
            audio.bit_rate = options.audio_bit_rate
            self._audio = audio
        self._video = video
        return video

    def _rounded(self, frame_HWC: NDArray[Any]) -> NDArray[np.uint8]:
        """To 8 bits, half up; bytes are taken as they are."""
        if frame_HWC.dtype == np.uint8:
            return frame_HWC
        _check_finite(frame_HWC, f"video VAE decode: frame {self.frames}")
        rounded: NDArray[np.uint8] = (np.clip(frame_HWC, 0, 1) * 255 + 0.5).astype(np.uint8)
        return rounded

    def _check_length(self, samples: int) -> None:
        sound, shown = samples / self._options.sample_rate, self.frames / self._options.fps
        if not samples or not end_together(sound, shown, self._options.fps):
            raise ValueError(
                f"the sound lasts {sound:.3f} s and the pictures {shown:.3f} s; "
                f"they must end within one frame of each other"
            )

    def _at_file_rate(self, wave_CL: NDArray[np.float32]) -> list[AudioFrame]:
        rate = self._options.sample_rate
        frame = AudioFrame.from_ndarray(
            np.ascontiguousarray(wave_CL), format="fltp", layout="stereo"
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        if rate == self._options.audio_rate:
            return [frame]
        resampler = AudioResampler(format="fltp", layout="stereo", rate=self._options.audio_rate)
        return [*resampler.resample(frame), *resampler.resample(None)]


def _check_finite(values: NDArray[np.float32], what: str) -> None:
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise ValueError(
            f"{what} holds {bad} of {values.size} values that are not finite; no video was written"
        )


def _to_yuv420(rgb_HWC: NDArray[np.uint8]) -> VideoFrame:
    """BT.709 limited range; libx264 itself would convert with BT.601."""
    return VideoFrame.from_ndarray(rgb_HWC, format="rgb24").reformat(
        format="yuv420p",
        src_colorspace=int(Colorspace.ITU709),
        dst_colorspace=int(Colorspace.ITU709),
        src_color_range=int(ColorRange.JPEG),
        dst_color_range=int(ColorRange.MPEG),
        interpolation=int(SCALING),
    )
