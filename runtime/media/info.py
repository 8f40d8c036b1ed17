"""What a media file holds, as far as a form or a check needs it; neither PyAV nor Pillow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "video", "audio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaInfo:
    """A file as it will be shown: width and height after rotation; 0, 0.0 or "" where not present.

    seconds and frames are what the header says (0: it does not say); bytes is the file size.
    """

    kind: MediaKind
    bytes: int
    seconds: float = 0.0
    width: int = 0
    height: int = 0
    rotated: bool = False
    has_alpha: bool = False
    fps: float = 0.0
    frames: int = 0
    hdr: str = ""  # "PQ" | "HLG" | ""
    video_codec: str = ""
    audio_codec: str = ""
    audio_channels: int = 0
    audio_rate: int = 0
