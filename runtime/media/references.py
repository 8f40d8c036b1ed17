"""One reference of a request to tensors, with everything that was changed on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.media.files import content_hash
from runtime.media.images import BACKGROUND, Alpha, Colour, load_image
from runtime.media.sounds import Downmix, load_sound
from runtime.media.soundtracks import rate_notes, soundtrack
from runtime.media.videos import Resize, as_stored, load_video
from runtime.messages import FPS, Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedMedia:
    """A decoded reference.

    pixels: float32 [F,H,W,3] in [0,1] (F is 1 for an image), None for a sound.
    wave: float32 [1,C,L] with C 1 or 2 at `rate` Hz, None without sound (rate is then 0).
    content_hash: SHA-256 hex of the file, for a replaced soundtrack of both files' hashes.
    """

    kind: str
    pixels: Tensor | None
    wave: Tensor | None
    rate: int
    content_hash: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How references are read; alpha="cut" and downmix="first_two" are what ComfyUI does.

    max_frames: video frames at 24 fps that the request can use. resize: uint8 [H,W,3] per frame.
    model_rate: Hz the model works at, only named in the notes.
    """

    max_frames: int
    resize: Resize = as_stored
    alpha: Alpha = "composite"
    background: Colour = BACKGROUND
    downmix: Downmix = "mix"
    model_rate: int = 32_000


def load_reference(reference: Reference, options: LoadOptions) -> LoadedMedia:
    """Decodes a reference. Raises ValueError in one sentence naming the file (see the loaders)."""
    load = {"image": _load_image, "video": _load_video, "audio": _load_audio}[reference.kind]
    return load(reference, options)


def _load_image(reference: Reference, options: LoadOptions) -> LoadedMedia:
    image = load_image(reference.path, alpha=options.alpha, background=options.background)
    return LoadedMedia(
        kind="image",
        pixels=torch.from_numpy(image.pixels),
        wave=None,
        rate=0,
        content_hash=content_hash(reference.path),
        notes=image.notes,
    )


def _load_audio(reference: Reference, options: LoadOptions) -> LoadedMedia:
    sound = load_sound(reference.path, downmix=options.downmix)
    return LoadedMedia(
        kind="audio",
        pixels=None,
        wave=torch.from_numpy(sound.wave),
        rate=sound.rate,
        content_hash=content_hash(reference.path),
        notes=sound.notes + rate_notes(sound, options.model_rate),
    )


def _load_video(reference: Reference, options: LoadOptions) -> LoadedMedia:
    video = load_video(
        reference.path,
        max_frames=options.max_frames,
        fps=FPS,
        resize=options.resize,
        alpha=options.alpha,
        background=options.background,
    )
    notes = list(video.notes)
    wave_1CL, rate = soundtrack(
        reference,
        notes,
        shown_frames=video.frames.shape[0],
        start_seconds=video.start_seconds,
        downmix=options.downmix,
        model_rate=options.model_rate,
    )
    return LoadedMedia(
        kind="video",
        pixels=torch.from_numpy(video.pixels()),
        wave=None if wave_1CL is None else torch.from_numpy(wave_1CL),
        rate=rate,
        content_hash=_video_hash(reference),
        notes=tuple(notes),
    )


def _video_hash(reference: Reference) -> str:
    """A muted video and one with another soundtrack are other conditionings than the plain file."""
    own = content_hash(reference.path)
    if reference.mute:
        return own + "-muted"
    if reference.soundtrack is not None:
        return own + "-" + content_hash(reference.soundtrack)
    return own
