"""Opening video and sound files safely: local, of listed formats, capped by their header."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition, Stream
from av.video.stream import VideoStream

from runtime.media.files import local_file

MAX_VIDEO_PIXELS = 8192 * 4320  # an RGB frame of it is 101 MiB
MAX_VIDEO_SECONDS = 3600.0
MAX_SOUND_SECONDS = 300.0  # 40 latents a second, two channels: 24,000 tokens in every step
DECODE_TIMEOUT_SECONDS = 300.0

# Playlists (concat, hls, dash), image sequences and devices are not here: they open other files.
_OPTIONS = {
    "format_whitelist": "mov,matroska,webm,avi,mpegts,mpeg,flv,gif,wav,w64,mp3,flac,ogg,aac,aiff",
    "protocol_whitelist": "file",
}
_IO_TIMEOUT_SECONDS = 10.0


@contextmanager
def open_media(path: Path) -> Iterator[InputContainer]:
    """Opens a video or sound file; ValueError in one sentence when it is neither or breaks off."""
    file = local_file(path)
    try:
        with av.open(
            str(file),
            options=dict(_OPTIONS),
            timeout=_IO_TIMEOUT_SECONDS,
            metadata_errors="replace",  # titles in Latin-1 and the like are common
        ) as container:
            if not len(container.streams):
                raise ValueError(unreadable(path, "it has no streams"))
            yield container
    except av.error.FFmpegError as error:
        raise ValueError(unreadable(path, str(error.strerror))) from error


def unreadable(path: Path, reason: str) -> str:
    """The sentence for a file that FFmpeg does not know or cannot read to its end."""
    return (
        f"{path} is not a readable picture, video or sound, or it is damaged or cut short "
        f"({reason}); give a png, jpg, webp, mp4, mov, mkv, webm, avi, gif, wav, mp3, flac or ogg "
        f"file"
    )


def intact_packets(
    path: Path, container: InputContainer, stream: VideoStream | AudioStream
) -> Iterator[Packet[Stream]]:
    """The packets of a stream; ValueError at one that the end of the file cuts short.

    Threaded decoders hide the fault and would drop the frame. In a transport stream the flag only
    says that the recording began midway.
    """
    for packet in container.demux(stream):
        if packet.is_corrupt and container.format.name != "mpegts":
            raise ValueError(unreadable(path, "the file ends before its last frame"))
        yield packet


def picture_stream(container: InputContainer) -> VideoStream | None:
    """The first stream of moving pictures; cover art of a sound file is none."""
    still = Disposition.attached_pic | Disposition.timed_thumbnails
    for stream in container.streams.video:
        if not stream.disposition & still:
            return stream
    return None


def stream_seconds(container: InputContainer, stream: Stream) -> float:
    """Duration that the header gives for the stream, else for the file; 0.0 when it gives none."""
    if stream.duration and stream.time_base:
        return stream.duration * float(stream.time_base)
    return container.duration / 1_000_000 if container.duration else 0.0


def check_duration(path: Path, seconds: float, most_seconds: float) -> None:
    """Raises ValueError when the file is longer than what is read."""
    if seconds > most_seconds:
        raise ValueError(
            f"{path} lasts {seconds:.1f} s, at most {most_seconds:.0f} s are read; cut it first"
        )


def check_pixels(path: Path, stream: VideoStream) -> None:
    """Raises ValueError when a frame is larger than what is decoded."""
    if stream.width * stream.height > MAX_VIDEO_PIXELS:
        raise ValueError(
            f"the video {path} is {stream.width}x{stream.height}, at most 8192x4320 is read; "
            f"make it smaller"
        )


class Deadline:
    """A wall-clock limit for decoding one file."""

    def __init__(self, path: Path, limit_seconds: float) -> None:
        self._path = path
        self._limit_seconds = limit_seconds
        self._end = time.monotonic() + limit_seconds

    def check(self) -> None:
        """Raises ValueError once the limit has passed."""
        if time.monotonic() > self._end:
            raise ValueError(
                f"decoding {self._path} took more than {self._limit_seconds:g} s; "
                f"make it smaller or shorter"
            )
