"""Integer rules of H3, without torch: sizes, frame and latent counts (contract 4, 7, 1.5)."""

from __future__ import annotations

import math

import numpy as np

from runtime.messages import FPS, REF_IMAGE_SIZES, SIZE_MULTIPLE

PIXELS_PER_LATENT = 16
FRAMES_PER_CLIP, FIRST_FRAMES = 17, 5  # frames n = 17k + 5 <-> latents 5k + 2
LATENTS_PER_CLIP, FIRST_LATENTS = 5, 2
FRAMES_PER_LATENT = 4  # but 1 of the first in each group of 5

IMAGE_SHORT_EDGE = 2048  # ref_image_size "max"
CANVAS_SHORT_EDGE = 768
CANVAS_PIXELS = 768 * 1344

SAMPLE_RATE = 32000
SAMPLES_PER_LATENT = 800
AUDIO_LATENTS_PER_SECOND = 40
_LEAST_VISION_PIXELS, _MOST_VISION_PIXELS = 3136, 12_845_056
TEXT_FRAME_STEP = 12  # the text encoder sees two frames a second

Size = tuple[int, int]  # width, height in pixels


def latent_frames(num_frames: int) -> int:
    """Video latents of 17k+5 frames: 5k+2."""
    if num_frames <= FIRST_FRAMES:
        return FIRST_LATENTS
    return (num_frames - FIRST_FRAMES) // FRAMES_PER_CLIP * LATENTS_PER_CLIP + FIRST_LATENTS


def num_frames(num_latents: int) -> int:
    """Frames of any number of video latents: 17 per whole group of 5, else 1, then 4 each."""
    groups, rest = divmod(num_latents, LATENTS_PER_CLIP)
    return groups * FRAMES_PER_CLIP + (1 + FRAMES_PER_LATENT * (rest - 1) if rest else 0)


def audio_latents_of_frames(num_frames: int) -> int:
    """Audio latents of a target with this many frames: 40 a second, halves to even."""
    return round(num_frames / FPS * AUDIO_LATENTS_PER_SECOND)


def resampled_length(num_samples: int, orig: int, new: int) -> int:
    """Samples after resampling from `orig` to `new` Hz.

    ComfyUI's resampler takes the ceiling of a float32 number, which on waves of seconds may be one
    sample less than the exact ceiling.
    """
    gcd = math.gcd(orig, new)
    return math.ceil(np.float32(new // gcd * num_samples / (orig // gcd)))


def audio_latents_of_samples(num_samples: int, sample_rate: int) -> int:
    """Audio latents of a sound: whole blocks of 800 samples at 32 kHz, the rest is cut."""
    return resampled_length(num_samples, sample_rate, SAMPLE_RATE) // SAMPLES_PER_LATENT


def size_of_image(width: int, height: int, *, mode: str, target: Size) -> Size:
    """Size at which a reference image is encoded; it is stretched to it.

    mode "match": never more pixels than the target; "max": short edge at most 2048. Never enlarged
    except by rounding each side to a multiple of 32.
    """
    if mode not in REF_IMAGE_SIZES:
        raise ValueError(
            f"ref_image_size must be one of {', '.join(REF_IMAGE_SIZES)}, got {mode!r}"
        )
    if mode == "match":
        scale = min(1.0, math.sqrt(target[0] * target[1] / (width * height)))
    else:
        scale = min(1.0, IMAGE_SHORT_EDGE / min(width, height))
    return _grid(width * scale), _grid(height * scale)


def adapted_canvas(width: int, height: int) -> Size:
    """The 768p canvas of an aspect ratio: short edge 768, area at most 768x1344, sides 32n."""
    scale = CANVAS_SHORT_EDGE / min(width, height)
    wide, high = width * scale, height * scale
    if wide * high > CANVAS_PIXELS:
        shrink = math.sqrt(CANVAS_PIXELS / (wide * high))
        wide, high = wide * shrink, high * shrink
    return _grid(wide), _grid(high)


def canvas_of_video(width: int, height: int) -> Size:
    """Size at which a reference video is encoded, whatever the size of the target.

    The 768p canvas, or its own size rounded to 32 if the source has fewer pixels than that canvas.
    """
    wide, high = adapted_canvas(width, height)
    if width * height < wide * high:
        return _grid(width), _grid(height)
    return wide, high


def _grid(side: float) -> int:
    return max(SIZE_MULTIPLE, round(side / SIZE_MULTIPLE) * SIZE_MULTIPLE)


def kept_frames(num_frames: int, target_frames: int) -> int:
    """Frames of a reference video that are encoded: cut to the target's count, floored to 17k+5."""
    kept = min(num_frames, target_frames)
    if kept < FIRST_FRAMES:
        raise ValueError(
            f"a reference video needs at least {FIRST_FRAMES} frames at {FPS} fps, "
            f"got {num_frames}; use a longer video or an image reference"
        )
    return _floor_to_grid(kept)


def guide_frames(num_frames: int) -> int:
    """Frames of a guide that are encoded: fewer than 5 give the first only, else 17k+5."""
    return 1 if num_frames < FIRST_FRAMES else _floor_to_grid(num_frames)


def _floor_to_grid(num_frames: int) -> int:
    return (num_frames - FIRST_FRAMES) // FRAMES_PER_CLIP * FRAMES_PER_CLIP + FIRST_FRAMES


def text_frames(num_frames: int) -> tuple[int, ...]:
    """Indices of the frames the text encoder sees; index i of them stands at i/2 seconds."""
    return tuple(range(0, num_frames, TEXT_FRAME_STEP))


def vision_size(height: int, width: int) -> tuple[int, int]:
    """Height and width the vision tower sees: multiples of 32, 3,136 to 12,845,056 pixels (5.3)."""
    th, tw = (
        round(height / SIZE_MULTIPLE) * SIZE_MULTIPLE,
        round(width / SIZE_MULTIPLE) * SIZE_MULTIPLE,
    )
    if th * tw > _MOST_VISION_PIXELS:
        shrink = math.sqrt(height * width / _MOST_VISION_PIXELS)
        th, tw = (
            max(SIZE_MULTIPLE, math.floor(s / shrink / SIZE_MULTIPLE) * SIZE_MULTIPLE)
            for s in (height, width)
        )
    elif th * tw < _LEAST_VISION_PIXELS:
        grow = math.sqrt(_LEAST_VISION_PIXELS / (height * width))
        th, tw = (math.ceil(s * grow / SIZE_MULTIPLE) * SIZE_MULTIPLE for s in (height, width))
    return th, tw


def vision_tokens(height: int, width: int) -> int:
    """Rows that one picture, or one pair of frames of a video, takes in the text."""
    high, wide = vision_size(height, width)
    return high // SIZE_MULTIPLE * (wide // SIZE_MULTIPLE)


def by(size: Size) -> str:
    """(960, 544) -> "960x544"."""
    return f"{size[0]}x{size[1]}"


def size_notes(size: Size, encoded: Size) -> tuple[str, ...]:
    """What is told of a picture that is encoded at another size."""
    return () if size == encoded else (f"{by(size)} -> {by(encoded)} pixels",)


def frames_notes(frames: int, kept: int) -> tuple[str, ...]:
    """What is told of a video of which fewer frames are encoded."""
    return () if kept == frames else (f"{frames} -> {kept} frames encoded, the rest cut",)


def resolved_frame(frame_index: int, target_frames: int) -> int:
    """Frame of a guide in the target; negative counts from the end (-1 is the last frame)."""
    resolved = frame_index + target_frames if frame_index < 0 else frame_index
    if not 0 <= resolved < target_frames:
        raise ValueError(
            f"a guide's frame must be {-target_frames} to {target_frames - 1}, got {frame_index}"
        )
    return resolved


def guide_audio_latents(resolved_index: int, target_frames: int) -> int:
    """Audio latents left from a guide's frame to the end of the target; ValueError if none."""
    rate = AUDIO_LATENTS_PER_SECOND / FPS
    left = math.floor(audio_latents_of_frames(target_frames) - rate * resolved_index)
    if left < 1:
        raise ValueError(
            f"an audio guide at frame {resolved_index} has no room in {target_frames} frames; "
            f"use an earlier frame"
        )
    return left


def check_guide_fits(resolved_index: int, num_frames: int, target_frames: int) -> None:
    """ValueError unless `num_frames` frames fit between the guide's frame and the target's end."""
    if resolved_index + num_frames > target_frames:
        raise ValueError(
            f"a guide of {num_frames} frames does not fit at frame {resolved_index} of "
            f"{target_frames}; use frame {max(0, target_frames - num_frames)} or a shorter guide"
        )
