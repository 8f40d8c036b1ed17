"""What a request will come to, without loading a model: `python -m runtime.h3.measure`.

A request as JSON comes on stdin, a Measure as JSON goes to stdout. Media are read by the loaders
that a run uses, so sizes, frames, rows and notes are those of the run. No torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.h3.packing import BlockShape, pack, target_of
from runtime.h3.sizes import (
    PIXELS_PER_LATENT,
    SAMPLE_RATE,
    audio_latents_of_samples,
    canvas_of_video,
    frames_notes,
    kept_frames,
    latent_frames,
    size_notes,
    size_of_image,
    text_frames,
    vision_tokens,
)
from runtime.h3.tokenizer import Tokenizer
from runtime.media.images import load_image
from runtime.media.sounds import load_sound
from runtime.media.soundtracks import rate_notes, soundtrack
from runtime.media.videos import read_video
from runtime.messages import FPS, Ref2VARequest, Reference

BAD_INPUT = 2
_ORDER = ("image", "video", "audio")  # of presentation (contract 4)
_WORDS = {"image": "Picture", "video": "Video", "audio": "Audio"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReference:
    """One reference, encoded: pixels, frames (1 for an image, 0 for a sound), sound latents."""

    kind: str
    width: int = 0
    height: int = 0
    frames: int = 0
    sound_latents: int = 0
    rows: int = 0  # in the packed sequence, without text
    text_rows: int = 0  # its label, its pictures as the text encoder sees them
    label: str = ""
    notes: tuple[str, ...] = ()
    problem: str = ""  # one sentence: the run would be refused

    @property
    def shape(self) -> BlockShape:
        """Its block of the packed sequence."""
        sound = "video_audio" if self.frames and self.sound_latents else ""
        return BlockShape(
            kind=sound or self.kind,  # type: ignore[arg-type]
            latent_t=latent_frames(self.frames) if self.kind == "video" else 1,
            latent_h=self.height // PIXELS_PER_LATENT,
            latent_w=self.width // PIXELS_PER_LATENT,
            audio_t=self.sound_latents,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A request as it will be packed; references stand in request order."""

    references: tuple[MeasuredReference, ...]
    text: int  # rows of prompt and labels and pictures together
    total: int  # packed rows
    negative: int  # packed rows of the other side; 0 without one (cfg 1)
    most_vision: int  # text rows of the largest picture


def measure(request: Ref2VARequest, tokenizer: Tokenizer) -> Measure:
    """Counts what the runtime will pack. A reference that cannot be read carries its problem."""
    found = [_measured(reference, request) for reference in request.references]
    found = _with_text(found, tokenizer)
    text = len(tokenizer.encode(request.prompt)) + sum(r.text_rows for r in found)
    negative = 0
    if not math.isclose(request.cfg, 1.0):
        both = found if request.negative_references else []
        own = len(tokenizer.encode(request.negative_prompt)) + sum(r.text_rows for r in both)
        negative = _packed(request, max(1, own), both)
    return Measure(
        references=tuple(found),
        text=max(1, text),  # nothing at all is one token (contract 5.2)
        total=_packed(request, max(1, text), found),
        negative=negative,
        most_vision=max((_picture_rows(r) for r in found), default=0),
    )


def _packed(request: Ref2VARequest, text: int, references: Sequence[MeasuredReference]) -> int:
    ordered = sorted(references, key=lambda r: _ORDER.index(r.kind))
    shapes = [r.shape for r in ordered if not r.problem]
    return pack(text_len=text, target=target_of(request), references=shapes).num_rows


def _measured(reference: Reference, request: Ref2VARequest) -> MeasuredReference:
    read = {"image": _image, "video": _video, "audio": _audio}[reference.kind]
    try:
        found = read(reference, request)
    except (ValueError, OSError) as error:
        return MeasuredReference(kind=reference.kind, problem=str(error))
    target = target_of(request)
    alone = pack(text_len=0, target=target)
    with_it = pack(text_len=0, target=target, references=[found.shape])
    return replace(found, rows=with_it.num_rows - alone.num_rows)


def _image(reference: Reference, request: Ref2VARequest) -> MeasuredReference:
    image = load_image(reference.path)
    height, width = image.pixels.shape[1:3]
    target = request.width, request.height
    encoded = size_of_image(width, height, mode=request.ref_image_size, target=target)
    return MeasuredReference(
        kind="image",
        width=encoded[0],
        height=encoded[1],
        frames=1,
        notes=(*image.notes, *size_notes((width, height), encoded)),
    )


def _video(reference: Reference, request: Ref2VARequest) -> MeasuredReference:
    video = read_video(reference.path, max_frames=request.frames, fps=FPS, resize=_canvas)
    frames = len(video.frames)
    notes = list(video.notes)
    wave, rate = soundtrack(
        reference,
        notes,
        shown_frames=frames,
        start_seconds=video.start_seconds,
        downmix="mix",
        model_rate=SAMPLE_RATE,
    )
    kept = kept_frames(frames, request.frames)
    height, width = video.frames[0].shape[:2]
    return MeasuredReference(
        kind="video",
        width=width,
        height=height,
        frames=kept,
        sound_latents=0 if wave is None else _latents(wave.shape[2], rate),
        notes=(*notes, *frames_notes(frames, kept)),
    )


def _audio(reference: Reference, request: Ref2VARequest) -> MeasuredReference:
    sound = load_sound(reference.path)
    return MeasuredReference(
        kind="audio",
        sound_latents=_latents(sound.wave.shape[2], sound.rate),
        notes=(*sound.notes, *rate_notes(sound, SAMPLE_RATE)),
    )


def _latents(samples: int, rate: int) -> int:
    latents = audio_latents_of_samples(samples, rate)
    if latents < 1:
        raise ValueError(
            f"a sound must last at least 25 ms, got {samples} samples at {rate} Hz; "
            f"use a longer one or none"
        )
    return latents


def _canvas(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A frame of the size that it will be encoded at, without pixels: it is only measured."""
    height, width = frame_HWC.shape[:2]
    wide, high = canvas_of_video(width, height)
    return np.broadcast_to(np.uint8(0), (high, wide, 3))


def _with_text(
    references: Sequence[MeasuredReference], tokenizer: Tokenizer
) -> list[MeasuredReference]:
    """Labels and text rows, counted in presentation order, returned in request order."""
    counts = dict.fromkeys(_WORDS.values(), 0)

    def label(kind: str) -> str:
        word = _WORDS[kind]
        counts[word] += 1
        return f"{word} {counts[word]}"

    found = list(references)
    for index in sorted(range(len(found)), key=lambda i: _ORDER.index(found[i].kind)):
        reference = found[index]
        labels = [label("audio")] if reference.kind == "video" and reference.sound_latents else []
        labels.append(label(reference.kind))
        rows = sum(len(tokenizer.encode(f"<{text}>: ")) for text in labels)
        rows += _seen_rows(reference, tokenizer)
        found[index] = replace(reference, label=labels[-1], text_rows=rows)
    return found


def _picture_rows(reference: MeasuredReference) -> int:
    return vision_tokens(reference.height, reference.width) if reference.frames else 0


def _seen_rows(reference: MeasuredReference, tokenizer: Tokenizer) -> int:
    """Rows of its pictures: one, or pairs of frames with their mean time (contract 5.2)."""
    picture = 2 + _picture_rows(reference)
    if reference.kind == "image" and not reference.problem:
        return picture
    times = [i / 2 for i in range(len(text_frames(reference.frames)))]
    times += times[-1:] * (len(times) % 2)
    pairs = zip(times[::2], times[1::2], strict=True)
    return sum(picture + len(tokenizer.encode(f"<{(a + b) / 2:.1f} seconds>")) for a, b in pairs)


def request_of(values: dict[str, Any]) -> Ref2VARequest:
    """A request from what JSON made of its dataclass."""
    references = tuple(
        Reference(
            kind=entry["kind"],
            path=Path(entry["path"]),
            soundtrack=None if entry["soundtrack"] is None else Path(entry["soundtrack"]),
            mute=entry["mute"],
        )
        for entry in values.pop("references")
    )
    return Ref2VARequest(references=references, **values)


def main() -> int:
    """Reads {"request": ..., "tokenizer": folder or null}; 2 and a sentence for bad input."""
    asked = json.load(sys.stdin)
    folder = asked["tokenizer"]
    try:
        tokenizer = Tokenizer(None if folder is None else Path(folder))
        found = measure(request_of(asked["request"]), tokenizer)
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
