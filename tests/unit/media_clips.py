"""Tiny media files for the media tests, made with PyAV, Pillow and numpy."""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 64, 48
QUARTER_TURNS = {  # tkhd matrices a b u c d v x y w of a 64x48 track
    90: (0, 1, 0, -1, 0, 0, 48, 0, 1),
    180: (-1, 0, 0, 0, -1, 0, 64, 48, 1),
    270: (0, -1, 0, 1, 0, 0, 0, 64, 1),
}


def grey(value: int, width: int = WIDTH, height: int = HEIGHT) -> NDArray[np.uint8]:
    return np.full((height, width, 3), value, np.uint8)


def write_clip(
    path: Path,
    images: Iterable[NDArray[Any]],
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    frame_format: str = "rgb24",
    fps: int | Fraction = 24,
    pts_ms: list[int] | None = None,
    options: dict[str, str] | None = None,
    matrix: int = 1,
    full_range: bool = False,
    transfer: int = 1,
    primaries: int = 1,
    tags: dict[str, str] | None = None,
    aspect: Fraction | None = None,
    sound: NDArray[np.float32] | None = None,
    sound_rate: int = 32_000,
) -> Path:
    """Encodes images (uint8 RGB, or in `frame_format` as they are) with the colour tags given."""
    images = list(images)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        height, width = images[0].shape[:2]
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.metadata.update(tags or {})
        context = stream.codec_context
        context.color_range = 2 if full_range else 1
        if frame_format == "rgb24":
            context.colorspace, context.color_trc = matrix, transfer
            context.color_primaries = primaries
        if aspect is not None:
            context.sample_aspect_ratio = aspect
        if pts_ms is not None:
            context.time_base = Fraction(1, 1000)
        audio = None
        if sound is not None:
            layout = "mono" if sound.shape[0] == 1 else "stereo"
            audio = container.add_stream("aac", rate=sound_rate, layout=layout)
        for index, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(image, format=frame_format)
            if frame_format == "rgb24" and not pix_fmt.startswith(("rgb", "gbr")):
                frame = frame.reformat(
                    format=pix_fmt,
                    src_colorspace=matrix,
                    dst_colorspace=matrix,
                    src_color_range=2,
                    dst_color_range=2 if full_range else 1,
                    interpolation=2 | 0x40000 | 0x4000,  # bilinear, accurate, all chroma read
                )
            if pts_ms is not None:
                frame.pts, frame.time_base = pts_ms[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if audio is not None:
            frame = av.AudioFrame.from_ndarray(sound, format="fltp", layout=audio.layout.name)
            frame.sample_rate, frame.pts, frame.time_base = sound_rate, 0, Fraction(1, sound_rate)
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return path


def write_counting(path: Path, count: int, **how: Any) -> Path:
    """Frame k is grey 3k+16, so that a decoded grey tells which frame it was (see which)."""
    how = {"options": {"qp": "0"}} | how  # lossless: neighbours differ by three levels only
    return write_clip(path, [grey(16 + 3 * k) for k in range(count)], **how)


def which(frames: NDArray[np.uint8]) -> list[int]:
    """Source index of each frame of write_counting."""
    return [round((float(frame.mean()) - 16) / 3) for frame in frames]


def write_hdr(path: Path, codes: list[float], transfer: int, primaries: int = 9) -> Path:
    """Three 10-bit BT.2020 frames with one grey stripe per signal value in [0,1]."""
    luma = np.repeat([round(64 + 876 * code) for code in codes], WIDTH // len(codes))
    planes = np.empty((HEIGHT * 3 // 2, WIDTH), np.uint16)
    planes[:HEIGHT], planes[HEIGHT:] = luma, 512
    with av.open(str(path), "w") as container:
        options = {"x265-params": "log-level=none:pools=none:frame-threads=1", "crf": "2"}
        stream = container.add_stream("libx265", rate=24, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p10le"
        context = stream.codec_context
        context.color_range, context.colorspace = 1, 9
        context.color_primaries, context.color_trc = primaries, transfer
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p10le")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def patch_matrix(path: Path, matrix: tuple[int, ...]) -> None:
    """Overwrites the display matrix of the first track of an mp4."""
    data = bytearray(path.read_bytes())
    box = data.find(b"tkhd") + 4
    offset = box + 4 + (20 if data[box] == 0 else 32) + 16
    fixed = [v * (1 << 30 if i in (2, 5, 8) else 1 << 16) for i, v in enumerate(matrix)]
    data[offset : offset + 36] = struct.pack(">9i", *fixed)
    path.write_bytes(data)


def tone(hertz: float, seconds: float, rate: int, level: float = 0.5) -> NDArray[np.float32]:
    """Sine, float32 [L]."""
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def write_wav(path: Path, samples_CL: NDArray[Any], rate: int) -> Path:
    """PCM WAV of uint8, int16 or int32 samples [C,L]."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples_CL.shape[0])
        file.setsampwidth(samples_CL.dtype.itemsize)
        file.setframerate(rate)
        file.writeframes(np.ascontiguousarray(samples_CL.T).tobytes())
    return path


def write_float_wav(path: Path, samples_CL: NDArray[np.float32], rate: int, layout: str) -> Path:
    """Float WAV (pcm_f32le) [C,L] in a layout that FFmpeg names, such as "5.1"."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_f32le", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples_CL.T.reshape(1, -1)), format="flt", layout=layout
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def peak_hertz(samples_L: NDArray[np.float32], rate: int) -> float:
    """Frequency of the strongest FFT bin of a windowed signal."""
    spectrum = np.abs(np.fft.rfft(samples_L * np.hanning(len(samples_L))))
    return float(spectrum.argmax() * rate / len(samples_L))


def level(samples: NDArray[np.float32]) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
