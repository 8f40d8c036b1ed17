"""What a media file holds, from its header and first frame: cheap and torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from av.audio.stream import AudioStream
from av.container import InputContainer
from av.video.stream import VideoStream

from runtime.media.colour import display_turn, has_alpha, hdr_name
from runtime.media.containers import (
    check_pixels,
    open_media,
    picture_stream,
    stream_seconds,
)
from runtime.media.files import local_file
from runtime.media.images import open_image, whole_image
from runtime.media.info import MediaInfo
from runtime.media.videos import first_frame, square_width

# First bytes of what Pillow reads; AVIF and WebP have theirs at 4 and 8.
_IMAGE_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"GIF8", b"II*\0", b"MM\0*")
_TURNED = range(5, 9)  # EXIF orientations that swap width and height


def probe(path: Path) -> MediaInfo:
    """Describes an image, video or sound file; ValueError in one sentence when it is none."""
    file = local_file(path)
    if _is_image(file):
        return _probe_image(path, file)
    with open_media(path) as container:
        video = picture_stream(container)
        audio = container.streams.audio[0] if container.streams.audio else None
        if video is None and audio is None:
            raise ValueError(f"{path} has neither pictures nor sound; give a media file")
        return _probe_streams(path, container, video, audio)


def _is_image(file: Path) -> bool:
    with file.open("rb") as opened:
        head = opened.read(16)
    webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    return head.startswith(_IMAGE_MAGIC) or webp or head[4:12] in (b"ftypavif", b"ftypavis")


def _probe_image(path: Path, file: Path) -> MediaInfo:
    with open_image(path) as image, whole_image(path):
        turned = image.getexif().get(0x0112, 1) in _TURNED
        width, height = image.size[::-1] if turned else image.size
        return MediaInfo(
            kind="image",
            bytes=file.stat().st_size,
            width=width,
            height=height,
            rotated=turned,
            has_alpha=image.has_transparency_data,
            frames=getattr(image, "n_frames", 1),
            video_codec=(image.format or "").lower(),
        )


def _probe_streams(
    path: Path, container: InputContainer, video: VideoStream | None, audio: AudioStream | None
) -> MediaInfo:
    stream = video or audio
    assert stream is not None
    info = MediaInfo(
        kind="video" if video else "audio",
        bytes=local_file(path).stat().st_size,
        seconds=stream_seconds(container, stream),
    )
    if audio is not None and audio.codec_context is not None:
        info = replace(
            info,
            audio_codec=audio.codec_context.name,
            audio_channels=audio.channels,
            audio_rate=audio.rate or 0,
        )
    if video is not None and video.codec_context is not None:
        info = _with_pictures(path, info, container, video)
    return info


def _with_pictures(
    path: Path, info: MediaInfo, container: InputContainer, video: VideoStream
) -> MediaInfo:
    check_pixels(path, video)
    frame = first_frame(path, container, video)
    transposed, _, _ = turn = display_turn(frame)
    width, height = square_width(video), video.height
    return replace(
        info,
        width=height if transposed else width,
        height=width if transposed else height,
        rotated=any(turn),
        has_alpha=has_alpha(frame),
        fps=float(video.average_rate or 0),
        frames=video.frames,
        hdr=hdr_name(frame),
        video_codec=video.codec_context.name,
    )
