"""Small pictures of pictures and videos, for lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from runtime.media.files import atomic_file
from runtime.media.images import open_image, whole_image
from runtime.media.videos import load_video

SIDE = 320  # of the longer edge, in pixels


def write_image_thumb(path: Path, thumb: Path) -> None:
    """Writes an upright WebP of an image's first frame; ValueError when it cannot be read."""
    with open_image(path) as image, whole_image(path):
        image.draft("RGB", (2 * SIDE, 2 * SIDE))  # JPEG decodes to a fraction of its size
        upright = ImageOps.exif_transpose(image)
        upright.thumbnail((SIDE, SIDE))
        _write(upright.convert("RGBA" if image.has_transparency_data else "RGB"), thumb)


def write_video_thumb(path: Path, thumb: Path) -> None:
    """Writes a WebP of a video's first frame, as it will be shown; ValueError when unreadable."""
    frames = load_video(path, max_frames=1, resize=_shrink).frames
    _write(Image.fromarray(frames[0]), thumb)


def _shrink(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    image = Image.fromarray(frame_HWC)
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)


def _write(image: Image.Image, thumb: Path) -> None:
    with atomic_file(thumb) as part:
        image.save(part, format="WEBP", quality=80)
