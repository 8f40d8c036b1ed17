"""Reference sounds: float32 at their own rate; mono stays mono, more than stereo is mixed down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from runtime.media.containers import (
    DECODE_TIMEOUT_SECONDS,
    MAX_SOUND_SECONDS,
    Deadline,
    check_duration,
    intact_packets,
    open_media,
    stream_seconds,
)

MAX_CHANNELS = 32

Downmix = Literal["mix", "first_two"]

# (left, right) gain of each speaker, ITU-R BS.775; the rows are divided by their sum.
_GAINS = {
    "FL": (1.0, 0.0),
    "FR": (0.0, 1.0),
    "FC": (0.5**0.5, 0.5**0.5),
    "BL": (0.5**0.5, 0.0),
    "BR": (0.0, 0.5**0.5),
    "SL": (0.5**0.5, 0.0),
    "SR": (0.0, 0.5**0.5),
    "BC": (0.5, 0.5),
    "LFE": (0.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSound:
    """wave: float32 [1,C,L], C 1 or 2 (left, right), full scale +-1; rate in Hz."""

    wave: NDArray[np.float32]
    rate: int
    start_seconds: float
    notes: tuple[str, ...]


def load_sound(
    path: Path,
    *,
    downmix: Downmix = "mix",
    max_seconds: float = MAX_SOUND_SECONDS,
    timeout_seconds: float = DECODE_TIMEOUT_SECONDS,
) -> LoadedSound:
    """Reads the first sound stream of a sound or video file at its own rate, any sample format.

    Mono stays one channel at full level (whoever duplicates it loses no 3 dB). More than two
    channels: downmix="mix" is ITU-R BS.775 (centre and surrounds at -3 dB, LFE dropped, divided by
    the sum of gains so that nothing clips), "first_two" keeps the first two as ComfyUI does.
    Raises ValueError without sound, when damaged, longer than `max_seconds` or not finite.
    """
    sound = find_sound(
        path, downmix=downmix, max_seconds=max_seconds, timeout_seconds=timeout_seconds
    )
    if sound is None:
        raise ValueError(f"{path} has no sound; give a sound file or a video with sound")
    return sound


def find_sound(
    path: Path,
    *,
    downmix: Downmix = "mix",
    max_seconds: float = MAX_SOUND_SECONDS,
    timeout_seconds: float = DECODE_TIMEOUT_SECONDS,
) -> LoadedSound | None:
    """load_sound, or None when a readable file has no sound stream."""
    deadline = Deadline(path, timeout_seconds)
    with open_media(path) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise ValueError(f"{path} has a sound codec that is not supported; save it as WAV")
        check_duration(path, stream_seconds(container, stream), max_seconds)
        if stream.channels > MAX_CHANNELS:
            raise ValueError(
                f"the sound {path} has {stream.channels} channels, at most "
                f"{MAX_CHANNELS} are read; save it as stereo"
            )
        frames = _decode(path, container, stream, deadline)
        first = next(frames, None)
        if first is None:
            raise ValueError(f"no sound can be decoded from {path}; give another file")
        wave_CL = _collect(path, first, frames, max_seconds)
    if not np.isfinite(wave_CL).all():
        raise ValueError(f"the sound {path} has samples that are not numbers; save it again")
    names = tuple(channel.name for channel in first.layout.channels)
    wave_CL, notes = _to_stereo(wave_CL, names, first.layout.name, downmix)
    start = first.pts * float(first.time_base) if first.pts and first.time_base else 0.0
    return LoadedSound(
        wave=np.ascontiguousarray(wave_CL[None]),
        rate=first.sample_rate,
        start_seconds=start,
        notes=notes,
    )


def _decode(
    path: Path, container: InputContainer, stream: AudioStream, deadline: Deadline
) -> Iterator[AudioFrame]:
    for packet in intact_packets(path, container, stream):
        deadline.check()
        for frame in packet.decode():
            assert isinstance(frame, AudioFrame)
            yield frame


def _collect(
    path: Path, first: AudioFrame, rest: Iterator[AudioFrame], max_seconds: float
) -> NDArray[np.float32]:
    """All samples as float32 [C,L], layout and rate of the first frame."""
    # Packed samples: PyAV crashes on planar frames of more than eight channels.
    resampler = AudioResampler(format="flt", layout=first.layout.name, rate=first.sample_rate)
    channels, most = first.layout.nb_channels, round(max_seconds * first.sample_rate)
    blocks: list[NDArray[np.float32]] = []
    samples = 0

    def keep(frame: AudioFrame | None) -> None:
        nonlocal samples
        for converted in resampler.resample(frame):
            block_LC = converted.to_ndarray().reshape(-1, channels).astype(np.float32)
            samples += len(block_LC)
            blocks.append(block_LC)
        check_duration(path, samples / first.sample_rate if samples > most else 0, max_seconds)

    keep(first)
    for frame in rest:
        keep(frame)
    keep(None)
    if not samples:
        raise ValueError(f"the sound {path} is empty; give one with at least a few samples")
    return np.ascontiguousarray(np.concatenate(blocks).T)


def _to_stereo(
    wave_CL: NDArray[np.float32], names: tuple[str, ...], layout: str, downmix: Downmix
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    channels = wave_CL.shape[0]
    if channels == 1:
        return wave_CL, ("mono, duplicated to stereo at full level",)
    if channels == 2:
        return wave_CL, ()
    if downmix == "first_two" or any(name not in _GAINS for name in names):
        return wave_CL[:2], (f"first two of {channels} sound channels ({layout}) used",)
    gains_2C = np.array([_GAINS[name] for name in names], dtype=np.float32).T
    gains_2C /= gains_2C.sum(axis=1, keepdims=True).clip(min=1)
    return gains_2C @ wave_CL, (f"{channels} sound channels ({layout}) mixed down to stereo",)
