"""Reference media as the encoders see them: resized, cut, sampled (contract 4). Pure, no files.

Axes: F frames, H height, W width, C channels (RGB or sound), L samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from runtime.h3.sizes import (
    Size,
    audio_latents_of_samples,
    canvas_of_video,
    check_guide_fits,
    frames_notes,
    guide_audio_latents,
    guide_frames,
    kept_frames,
    resolved_frame,
    size_notes,
    size_of_image,
    text_frames,
)
from runtime.messages import ReferenceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMedia:
    """One reference as loaded: pictures at 24 fps, sound at its own rate.

    content_hash identifies pictures and sound together, so a muted or re-dubbed video has another.
    on_canvas: the frames of this video went through `to_canvas` when they were read.
    """

    kind: ReferenceKind
    pixels: Tensor | None  # [F,H,W,3] float32 in [0,1]
    wave: Tensor | None  # [1,C,L] float32
    sample_rate: int  # Hz of the wave, 0 without one
    content_hash: str
    on_canvas: bool = False

    def __post_init__(self) -> None:
        if (self.kind == "audio") is (self.pixels is not None):
            raise ValueError(f"pictures belong to an image or video reference, got {self.kind!r}")
        if self.kind == "image" and self.wave is not None:
            raise ValueError("an image reference has no sound; pass it as an audio reference")
        if self.kind == "audio" and self.wave is None:
            raise ValueError("an audio reference needs a wave, got none")
        if self.pixels is not None:
            check_pixels(self.pixels)
        if self.wave is not None:
            check_wave(self.wave, self.sample_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """Pictures or a sound that pin a place of the target; the text encoder does not see them.

    frame_index: target frame, negative counts from the end. Exactly one of pixels and wave is given
    (ComfyUI's node takes both at once: that is two guides of the same frame).
    """

    frame_index: int
    pixels: Tensor | None = None  # [F,H,W,3] float32 in [0,1]
    wave: Tensor | None = None  # [1,C,L] float32
    sample_rate: int = 0
    content_hash: str

    def __post_init__(self) -> None:
        if (self.pixels is None) is (self.wave is None):
            raise ValueError("a guide is either pictures or a sound; make two guides for both")
        if self.pixels is not None:
            check_pixels(self.pixels)
        if self.wave is not None:
            check_wave(self.wave, self.sample_rate)


def check_pixels(pixels_FHWC: Tensor) -> None:
    """ValueError unless these are frames [F,H,W,3], float32, at least one."""
    shape = tuple(pixels_FHWC.shape)
    if len(shape) != 4 or shape[3] != 3 or 0 in shape or pixels_FHWC.dtype != torch.float32:
        raise ValueError(
            f"pictures must be float32 [frames, height, width, 3] in [0, 1], "
            f"got {pixels_FHWC.dtype} {list(shape)}"
        )


def check_wave(wave_CL: Tensor, sample_rate: int) -> None:
    """ValueError unless this is a wave [1,C,L], float32, with a rate, of one latent or more."""
    shape = tuple(wave_CL.shape)
    if len(shape) != 3 or shape[0] != 1 or 0 in shape or wave_CL.dtype != torch.float32:
        raise ValueError(
            f"a sound must be float32 [1, channels, samples], got {wave_CL.dtype} {list(shape)}"
        )
    if sample_rate < 1:
        raise ValueError(f"a sound needs its sample rate in Hz, got {sample_rate}")
    if audio_latents_of_samples(shape[2], sample_rate) < 1:
        raise ValueError(
            f"a sound must last at least 25 ms, got {shape[2]} samples at {sample_rate} Hz; "
            f"use a longer one or none"
        )


def size_of(pixels_FHWC: Tensor) -> Size:
    """Width and height in pixels."""
    return pixels_FHWC.shape[2], pixels_FHWC.shape[1]


def resize_lanczos(pixels_FHWC: Tensor, size: Size) -> Tensor:
    """Frames in [0,1] stretched to `size`: truncated to 8 bits, LANCZOS, back to float32 (0.1.2).

    Also frames that have the size already go through 8 bits, as in ComfyUI.
    """
    frames = (_resize_frame(frame, size) for frame in _to_bytes(pixels_FHWC))
    return torch.from_numpy(np.stack(list(frames)).astype(np.float32) / np.float32(255))


def _to_bytes(pixels_FHWC: Tensor) -> NDArray[np.uint8]:
    return (pixels_FHWC * 255).clamp(0, 255).to(torch.uint8).numpy()


def _resize_frame(frame_HWC: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    image = Image.fromarray(frame_HWC)
    # Two calls pin the order; Pillow 12 goes horizontally first, Pillow 13 sometimes does not.
    image = image.resize((size[0], image.height), Image.Resampling.LANCZOS)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS))


def to_canvas(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One frame of a reference video on its canvas: for loaders that would not fit in memory else.

    The same bytes as resizing all frames later; mark the media `on_canvas`.
    """
    height, width = frame_HWC.shape[:2]
    return _resize_frame(frame_HWC, canvas_of_video(width, height))


def crop_to_aspect(pixels_FHWC: Tensor, size: Size) -> Tensor:
    """The centre of the frames with the aspect of `size`; both margins are equal and rounded."""
    width, height = size_of(pixels_FHWC)
    have, want = width / height, size[0] / size[1]
    x = round((width - width * (want / have)) / 2) if have > want else 0
    y = round((height - height * (have / want)) / 2) if have < want else 0
    return pixels_FHWC[:, y : height - y, x : width - x]


def image_size(media: ReferenceMedia, *, mode: str, target: Size) -> Size:
    """The size at which this image reference is encoded."""
    assert media.pixels is not None
    return size_of_image(*size_of(media.pixels), mode=mode, target=target)


def encoding_notes(
    media: ReferenceMedia, *, mode: str, target: Size, target_frames: int
) -> tuple[str, ...]:
    """What preparing will change: the size of a picture, the frames of a video that are kept."""
    if media.pixels is None:
        return ()
    if media.kind == "image":
        return size_notes(size_of(media.pixels), image_size(media, mode=mode, target=target))
    frames = len(media.pixels)
    return frames_notes(frames, kept_frames(frames, target_frames))


def prepare_image(media: ReferenceMedia, *, mode: str, target: Size) -> Tensor:
    """The first frame, stretched to its encoded size: [1,H,W,3] for both encoders."""
    assert media.pixels is not None
    return resize_lanczos(media.pixels[:1], image_size(media, mode=mode, target=target))


def video_size(media: ReferenceMedia) -> Size:
    """The size at which this video reference is encoded."""
    assert media.pixels is not None
    size = size_of(media.pixels)
    return size if media.on_canvas else canvas_of_video(*size)


def prepare_video(media: ReferenceMedia, *, target_frames: int) -> Tensor:
    """Frames for the VAE: on the canvas, cut to the target's count, floored to 17k+5.

    ValueError for fewer than 5 frames. ComfyUI resizes first and cuts then, with the same result.
    """
    assert media.pixels is not None
    kept = kept_frames(len(media.pixels), target_frames)
    return resize_lanczos(media.pixels[:kept], video_size(media))


def prepare_text_frames(
    media: ReferenceMedia, *, target_frames: int
) -> tuple[Tensor, tuple[float, ...]]:
    """Every 12th of those frames for the text encoder, and their times in seconds."""
    assert media.pixels is not None
    indices = text_frames(kept_frames(len(media.pixels), target_frames))
    frames = resize_lanczos(media.pixels[list(indices)], video_size(media))
    return frames, tuple(i / 2 for i in range(len(indices)))


def prepare_first_frame(pixels_FHWC: Tensor, target: Size) -> Tensor:
    """The first frame of the target: stretched to the target's size, [1,H,W,3]."""
    return resize_lanczos(pixels_FHWC[:1], target)


def prepare_last_frame(pixels_FHWC: Tensor, target: Size) -> Tensor:
    """The last frame of the target: cropped to its aspect, then resized, [1,H,W,3]."""
    return resize_lanczos(crop_to_aspect(pixels_FHWC[:1], target), target)


def guide_place(guide: Guide, *, target_frames: int) -> tuple[int, int]:
    """Resolved target frame, and frames of the guide that are encoded (1 or 17k+5).

    For a sound: the most audio latents that fit from there on. ValueError if it does not fit.
    """
    index = resolved_frame(guide.frame_index, target_frames)
    if guide.pixels is None:
        return index, guide_audio_latents(index, target_frames)
    kept = guide_frames(len(guide.pixels))
    check_guide_fits(index, kept, target_frames)
    return index, kept


def prepare_guide(guide: Guide, *, target: Size, kept: int) -> Tensor:
    """The first `kept` frames, cropped to the target's aspect and resized to its size."""
    assert guide.pixels is not None
    return resize_lanczos(crop_to_aspect(guide.pixels[:kept], target), target)
