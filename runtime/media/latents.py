"""A latents file by its header, without torch: two tensors and the request that they came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoints.header import read_header
from runtime.quoted import quoted

Shape = tuple[int, ...]
_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentsForm:
    """What such a file of a family holds.

    video, audio: shapes; 0 stands for any size of at least 1. words: the same for a person.
    key: of the request in the metadata. fps: least and most frames a second that it has to tell.
    apart: of both shapes, in words how sound and pictures do not end together, "" where they do;
    None where any two go together.
    """

    video: Shape
    audio: Shape
    words: tuple[str, str]
    key: str
    fps: tuple[int, int] | None = None
    apart: Callable[[Shape, Shape], str] | None = None


def end_together(sound: float, pictures: float, fps: float) -> bool:
    """Whether so many seconds of both may share a video: they end within one frame."""
    return abs(sound - pictures) <= 1 / fps


def check_latents(path: Path, form: LatentsForm) -> Any:
    """The request of the file, None where it tells none; ValueError with one sentence otherwise."""
    header = read_header(path)
    shapes = {n: header.tensors[n].shape for n in ("video", "audio") if n in header.tensors}
    video, audio = form.words
    if missing := {"video", "audio"} - shapes.keys():
        raise ValueError(
            f"{path} holds no tensor {' and '.join(sorted(missing))}; a latents file has 'video' "
            f"{video} and 'audio' {audio}"
        )
    if not (_fits(shapes["video"], form.video) and _fits(shapes["audio"], form.audio)):
        raise ValueError(
            f"{path} holds 'video' {list(shapes['video'])} and 'audio' {list(shapes['audio'])}; "
            f"they must be {video} and {audio}"
        )
    if form.apart is not None and (told := form.apart(shapes["video"], shapes["audio"])):
        raise ValueError(f"{path} holds {told}; give the latents file of a run")
    for name in shapes:
        if (dtype := header.tensors[name].dtype) not in _DTYPES:
            raise ValueError(f"{path} holds {name!r} as {dtype}; latents are {', '.join(_DTYPES)}")
    try:
        request = json.loads(header.metadata.get(form.key, "null"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a {form.key} that is not JSON: {error}") from error
    if form.fps is not None:
        _check_fps(path, request, form.key, *form.fps)
    return request


def _check_fps(path: Path, request: Any, key: str, slow: int, fast: int) -> None:
    if not isinstance(request, dict) or "fps" not in request:
        raise ValueError(
            f"{path} does not tell its frames a second ({key} in its metadata); give the latents "
            f"file of a run"
        )
    fps = request["fps"]
    if type(fps) is not int or not slow <= fps <= fast:
        raise ValueError(
            f"{path} says fps {quoted(fps)}; it must be a whole number from {slow} to {fast}"
        )


def _fits(found: Shape, wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(
        got == want if want else got > 0 for got, want in zip(found, wanted, strict=True)
    )
