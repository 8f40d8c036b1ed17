"""What is counted before a run is what the run packs, reports and does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app import presets
from runtime.clock import StageClock
from runtime.h3.measure import Measure, measure
from runtime.h3.pipeline import Pipeline, load
from runtime.h3.tokenizer import Tokenizer
from runtime.messages import Event, Note, Ref2VARequest, Reference
from tests.unit.media_clips import grey, tone, write_clip, write_wav


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    plan = replace(presets.load_plan(presets.find("plans", "cpu")), threads=1)
    return load(plan, progress=lambda stage, done, total: None)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(None)


@pytest.fixture
def references(tmp_path: Path) -> tuple[Reference, ...]:
    """A sound, a video at 30 fps with sound, a muted video and two pictures, in a mixed order."""
    sound, shown, muted = tmp_path / "bell.wav", tmp_path / "clip.mp4", tmp_path / "mute.mp4"
    write_wav(sound, (tone(440, 1.01, 22_050)[None] * 9999).astype(np.int16), 22_050)
    frames = [grey(6 * i) for i in range(40)]
    write_clip(shown, frames[:30], fps=30, sound=tone(330, 1.6, 32_000)[None], sound_rate=32_000)
    write_clip(muted, frames, fps=24)
    wide, high = tmp_path / "wide.png", tmp_path / "high.png"
    Image.fromarray(np.full((90, 333, 3), 9, np.uint8)).save(wide)
    Image.fromarray(np.full((64, 32, 3), 9, np.uint8)).save(high)
    return (
        Reference(kind="audio", path=sound),
        Reference(kind="video", path=shown),
        Reference(kind="image", path=wide),
        Reference(kind="video", path=muted, mute=True),
        Reference(kind="image", path=high),
    )


def asked(**fields: object) -> Ref2VARequest:
    small = {"width": 96, "height": 64, "frames": 22, "steps": 1, "id": "m"}
    return Ref2VARequest(**({"prompt": "a <Video 1> by the sea"} | small | fields))  # type: ignore[arg-type]


def ran(pipeline: Pipeline, request: Ref2VARequest, out: Path) -> tuple[list[str], int]:
    """The notes of a real run, and the packed rows that one of them names."""
    notes: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    pipeline.generate(
        request,
        out=out,
        media=False,
        preview=False,
        emit=emit,
        cancelled=lambda: False,
        clock=StageClock(),
    )
    rows = next(m for note in notes if (m := re.fullmatch(r"(\d+) packed rows", note)))
    return notes, int(rows[1])


def test_every_kind_of_reference_is_counted_and_noted_as_the_run_does(
    pipeline: Pipeline, tokenizer: Tokenizer, references: tuple[Reference, ...], tmp_path: Path
) -> None:
    request = asked(references=references)
    found = measure(request, tokenizer)
    notes, rows = ran(pipeline, request, tmp_path)
    assert found.total == rows
    for reference, measured in zip(references, found.references, strict=True):
        own = f"{reference.path.name}: "
        assert [own + note for note in measured.notes] == [n for n in notes if n.startswith(own)]
    labels = [measured.label for measured in found.references]
    assert labels == ["Audio 2", "Video 1", "Picture 1", "Video 2", "Picture 2"]


@pytest.mark.parametrize("prompt", ["", "a calm sea", "Café <|image_pad|> 東京 <Picture 9>"])
def test_a_prompt_alone_is_counted_exactly(
    pipeline: Pipeline, tokenizer: Tokenizer, prompt: str, tmp_path: Path
) -> None:
    request = asked(prompt=prompt, width=64, height=160, frames=5)
    assert measure(request, tokenizer).total == ran(pipeline, request, tmp_path)[1]


@pytest.mark.parametrize("mode", ["match", "max"])
def test_the_size_of_a_reference_follows_its_mode(
    tokenizer: Tokenizer, references: tuple[Reference, ...], mode: str
) -> None:
    (one,) = measure(asked(references=references[2:3], ref_image_size=mode), tokenizer).references
    assert (one.width, one.height) == ((160, 32) if mode == "match" else (320, 96))


def test_guidance_counts_the_other_side(
    tokenizer: Tokenizer, references: tuple[Reference, ...]
) -> None:
    def sides(**fields: object) -> Measure:
        return measure(asked(references=references, cfg=3.0, **fields), tokenizer)

    alone, both = sides(), sides(negative_references=True)
    text = len(tokenizer.encode(asked().prompt))
    of_references = sum(one.rows + one.text_rows for one in alone.references)
    assert alone.negative == alone.total - of_references - text + 1
    assert both.negative == both.total - text


def test_a_video_of_too_few_frames_is_a_problem_and_not_an_error(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    short = write_clip(tmp_path / "short.mp4", [grey(9)] * 3)
    (one,) = measure(asked(references=(Reference(kind="video", path=short),)), tokenizer).references
    assert "at least 5 frames" in one.problem
