"""The preview: contract 0.1.15's colours, real speed, and a run that it does not change."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.h3.preview import (
    BIAS,
    FACTORS,
    Previews,
    rgb_frames,
    shown_milliseconds,
    write_webp,
)
from runtime.h3.sizes import latent_frames

ROOT = Path(__file__).parents[2]
LATENT = torch.randn((1, 24, 7, 3, 5), generator=torch.Generator().manual_seed(3)) * 2


def test_a_pixel_is_the_formula_of_the_contract() -> None:
    frames = rgb_frames(LATENT)
    assert frames.shape == (7, 3, 5, 3) and frames.dtype == np.uint8
    for t, y, x in ((0, 0, 0), (3, 2, 4), (6, 1, 2)):
        pixel = LATENT[0, :, t, y, x].double().numpy()
        for colour in range(3):
            value = sum(pixel[c] * FACTORS[c][colour] for c in range(24)) + BIAS[colour]
            expected = min(255.0, max(0.0, (value + 1) * 127.5))
            assert abs(float(frames[t, y, x, colour]) - expected) <= 0.501


def test_the_factors_are_those_of_the_contract() -> None:
    text = (ROOT / "docs/reference/h3_contract.md").read_text(encoding="utf-8")
    item = text.split("**2.7 RGB preview:**")[1].split("(Values in")[0]
    rows = [tuple(map(float, row.split(","))) for row in re.findall(r"\[([-.,\d]+)\]", item)]
    assert len(rows) == 25 and rows == [*FACTORS, BIAS]


def test_zero_is_the_bias_and_the_brightness_channel_is_bright() -> None:
    grey = rgb_frames(torch.zeros(1, 24, 1, 1, 1))[0, 0, 0]
    assert grey.tolist() == [135, 125, 118]  # (bias + 1) * 127.5
    luma = torch.zeros(1, 24, 1, 1, 1)
    luma[0, 9] = 1.0  # the channel that is mostly brightness
    assert rgb_frames(luma)[0, 0, 0].tolist() == [203, 195, 198]


def test_the_latent_is_not_written() -> None:
    before = LATENT.clone()
    rgb_frames(LATENT)
    assert torch.equal(LATENT, before)


@pytest.mark.parametrize("frames", [5, 22, 124, 362])
def test_it_plays_as_long_as_the_clip(frames: int) -> None:
    shown = shown_milliseconds(latent_frames(frames))
    assert len(shown) == latent_frames(frames)
    assert sum(shown) == round(1000 * frames / 24)
    assert all(time in (41, 42) for time in shown[::5]), "one frame of video"
    assert all(time in (166, 167) for i, time in enumerate(shown) if i % 5), "four"


def test_the_file_holds_every_pixel_and_every_time(tmp_path: Path) -> None:
    frames, shown = rgb_frames(LATENT), shown_milliseconds(7)
    write_webp(tmp_path / "preview.webp", frames, shown)
    assert [p.name for p in tmp_path.iterdir()] == ["preview.webp"]
    with Image.open(tmp_path / "preview.webp") as animation:
        assert animation.n_frames == 7 and animation.info["loop"] == 0
        ends = []
        for index in range(7):
            animation.seek(index)
            assert np.array_equal(np.asarray(animation.convert("RGB")), frames[index])
            ends.append(animation.info["duration"])
    assert tuple(ends) == shown


def test_every_step_is_told_from_another_thread_once_it_is_written(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = tmp_path / "preview.webp"

    def written(step: int, file: Path) -> None:
        assert Image.open(file).n_frames == 7
        told.append((step, threading.get_ident()))

    previews = Previews(path, written, pytest.fail)
    for step in range(3):
        previews.show(step, LATENT)
    previews.close()
    assert [step for step, _ in told] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in told}


def test_a_preview_that_cannot_be_written_is_said_once_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    reasons: list[str] = []
    previews = Previews(tmp_path / "file" / "preview.webp", pytest.fail, reasons.append)
    for step in range(3):
        previews.show(step, LATENT)
    previews.close()
    assert len(reasons) == 1 and "Not a directory" in reasons[0]
