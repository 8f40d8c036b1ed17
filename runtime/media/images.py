"""Reference pictures from image files: upright, 8-bit, RGB, alpha composited on a stated colour."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from runtime.media.files import local_file

Alpha = Literal["composite", "cut"]
Colour = tuple[int, int, int]

BACKGROUND: Colour = (128, 128, 128)  # what shows through transparent pixels: #808080
MAX_IMAGE_PIXELS = 2**26  # 8192 x 8192; a 200 KB file can hold 200 times its size in pixels
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")

# What Pillow's readers were seen to raise on damaged files (OSError: unidentified, cut short).
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    RuntimeError,
    LookupError,
    TypeError,
    struct.error,
)

_ORIENTATION = 0x0112  # the EXIF tag
_DEEP_GREY = ("I", "I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedImage:
    """pixels: float32 [1,H,W,3], sRGB values in [0,1], each a multiple of 1/255."""

    pixels: NDArray[np.float32]
    notes: tuple[str, ...]


def load_image(
    path: Path, *, alpha: Alpha = "composite", background: Colour = BACKGROUND
) -> LoadedImage:
    """Reads the first frame of an image file, turned upright by its EXIF tag.

    alpha="composite" blends transparent pixels with `background` (0-255 per channel, on the stored
    sRGB values, as browsers do); alpha="cut" drops the alpha plane as ComfyUI does, so that the
    hidden colour of transparent pixels shows. Every change is told in `notes`.
    Raises ValueError for what is not an image, is broken, or has more than MAX_IMAGE_PIXELS.
    """
    with open_image(path) as file:
        with whole_image(path):
            notes = _frame_notes(file)
            upright = ImageOps.exif_transpose(file)
            upright.load()
        eight_bit = _to_8_bit(upright, path, notes)
        rgb_HWC = _to_rgb(eight_bit, alpha, background, notes)
    pixels_1HWC = rgb_HWC[None].astype(np.float32) / np.float32(255)
    return LoadedImage(pixels=pixels_1HWC, notes=tuple(notes))


def open_image(path: Path) -> Image.Image:
    """Opens by content, header only; the caller closes it. ValueError as for load_image."""
    file = local_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(file, formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ValueError(_too_large(path, "more")) from error
        except _DAMAGED as error:
            raise ValueError(
                f"{path} is not a picture that can be read; "
                f"give a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
            ) from error
    if image.width * image.height > MAX_IMAGE_PIXELS:
        image.close()
        raise ValueError(_too_large(path, f"{image.width}x{image.height}"))
    return image


@contextmanager
def whole_image(path: Path) -> Iterator[None]:
    """Turns what Pillow raises on damaged data into one sentence; EXIF of a PNG may need it all."""
    try:
        yield
    except _DAMAGED as error:
        raise ValueError(
            f"the picture {path} is broken or cut short ({error}); save it again"
        ) from error


def blend(rgba_HWC: NDArray[np.uint8], background: Colour) -> NDArray[np.uint8]:
    """Straight-alpha uint8 [H,W,4] over `background` (0-255), rounded to uint8 [H,W,3]."""
    alpha_HW1 = rgba_HWC[..., 3:].astype(np.uint32)
    under = np.asarray(background, dtype=np.uint32)
    sum_HWC = rgba_HWC[..., :3] * alpha_HW1 + under * (255 - alpha_HW1)
    return ((sum_HWC + 127) // 255).astype(np.uint8)


def hex_colour(colour: Colour) -> str:
    """(128, 128, 128) -> "#808080"."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _too_large(path: Path, size: str) -> str:
    return (
        f"the picture {path} has {size} pixels, at most {MAX_IMAGE_PIXELS:,} (8192x8192) are read; "
        f"make it smaller"
    )


def _frame_notes(file: Image.Image) -> list[str]:
    notes = []
    frames = getattr(file, "n_frames", 1)
    if frames > 1:
        notes.append(f"first of {frames} frames of the animated picture used")
    orientation = file.getexif().get(_ORIENTATION, 1)
    if orientation in range(2, 9):
        notes.append(f"turned upright by its EXIF orientation {orientation}")
    profile = _profile_name(file)
    if profile and "srgb" not in profile.lower():
        notes.append(f"colour profile {profile!r} not applied, values read as sRGB")
    return notes


def _profile_name(file: Image.Image) -> str:
    """Name of the embedded ICC profile, "" without one."""
    data = file.info.get("icc_profile")
    if not data:
        return ""
    try:
        return ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(BytesIO(data))).strip()
    except (OSError, ImageCms.PyCMSError):
        return "unreadable"


def _to_8_bit(image: Image.Image, path: Path, notes: list[str]) -> Image.Image:
    """16-bit grey is scaled by 1/257 and rounded; Pillow's own convert() would clip it at 255."""
    if image.mode in ("F", "LAB"):
        kind = "float" if image.mode == "F" else "LAB"
        raise ValueError(f"the picture {path} has {kind} pixels; save it as 8-bit or 16-bit RGB")
    if image.mode not in _DEEP_GREY:
        return image
    grey_HW = np.asarray(image).astype(np.int64)
    if grey_HW.min() < 0 or grey_HW.max() > 65535:
        raise ValueError(f"the picture {path} has 32-bit pixels; save it with 8 or 16 bits")
    notes.append("16-bit grey reduced to 8 bits")
    return Image.fromarray(((grey_HW + 128) // 257).astype(np.uint8))


def _to_rgb(
    image: Image.Image, alpha: Alpha, background: Colour, notes: list[str]
) -> NDArray[np.uint8]:
    if image.mode in ("CMYK", "YCbCr", "HSV"):
        notes.append(f"{image.mode} converted to RGB")
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    if alpha == "cut":
        notes.append("alpha plane dropped, hidden colours of transparent pixels shown")
        return np.asarray(image.convert("RGB"))
    rgba_HWC = np.asarray(image.convert("RGBA"))
    if (rgba_HWC[..., 3] == 255).all():
        return rgba_HWC[..., :3]
    notes.append(f"alpha composited on {hex_colour(background)}")
    return blend(rgba_HWC, background)
