"""The page in a real browser over the real demo model."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.ui.conftest import Page


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("references")
    found = {name: folder / name for name in ("boat.png", "gull.png", "bell.wav", "words.png")}
    Image.fromarray(np.full((64, 96, 3), (30, 90, 160), np.uint8)).save(found["boat.png"])
    Image.fromarray(np.full((96, 64, 3), (200, 200, 190), np.uint8)).save(found["gull.png"])
    found["words.png"].write_text("this is no picture")
    with wave.open(str(found["bell.wav"]), "wb") as sound:
        sound.setparams((2, 2, 32000, 0, "NONE", ""))
        sound.writeframes(np.random.default_rng(0).integers(-99, 99, 64000, np.int16).tobytes())
    return found


def test_two_pictures_and_a_sound_become_a_video_that_plays(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"], files["gull.png"], files["bell.wav"])
    page.fill("#steps input", "40")
    page.click("#go")
    page.until(lambda: page.state() == "running" and "denoise, step" in page.text(".run-phase"))
    assert 0 < int(page.all(".bar")[0].get_attribute("aria-valuenow") or 0) <= 40
    page.shot("1440_light_running")
    page.until(lambda: page.state() == "done")
    video = "const v=document.querySelector('.run video');"
    page.until(lambda: page.js(f"{video}return v.readyState") == 4)
    assert page.js(f"{video}return [v.videoWidth, v.videoHeight]") == [96, 64]
    page.js(f"{video}v.muted=true;v.play()")
    page.until(lambda: page.js(f"{video}return v.ended || v.currentTime > 0.2"))
    names = {cell.text for cell in page.all(".times th")}
    assert {"text encode", "denoise", "per step", "mux", "E2E", "peak memory"} <= names
    assert page.all(".notes li")


def test_the_demo_model_says_that_its_weights_are_random(page: Page) -> None:
    assert "Its weights are random" in page.text("#demo-banner")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_window(page: Page, width: int, theme: str) -> None:
    page.open(width=width, theme=theme)
    page.shot(f"{width}_{theme}")
    assert page.js("return document.documentElement.scrollWidth") <= width
    wide = (
        "return [...document.querySelectorAll('body *')].filter(e=>e.offsetParent&&"
        "e.getBoundingClientRect().right>innerWidth+1).map(e=>e.className).slice(0,5)"
    )
    assert page.js(wide) == []


def test_a_long_file_name_in_the_notes_wraps_on_a_phone(page: Page, tmp_path: Path) -> None:
    picture = tmp_path / f"{'x' * 72}.png"
    Image.fromarray(np.full((128, 192, 3), 90, np.uint8)).save(picture)  # shrunk: a note names it
    page.open(width=390)
    page.upload(picture)
    page.click("#go")
    page.until(lambda: page.state() == "done" and picture.name in page.text(".notes"))
    page.shot("390_light_long_name")
    assert page.js("return document.documentElement.scrollWidth") == 390


def test_everything_the_page_loads_comes_from_the_console(page: Page) -> None:
    names = page.js("return performance.getEntriesByType('resource').map(e=>e.name)")
    assert names and all(name.startswith((page.url, "data:", "blob:")) for name in names)


def test_references_are_numbered_by_kind_and_follow_their_order(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"], files["bell.wav"], files["gull.png"])
    tags = [tag.text for tag in page.all(".tag")]
    assert tags == ["<Picture 1>", "<Audio 1>", "<Picture 2>"]
    page.click(".ref:nth-child(3) [data-act=up]")
    page.until(lambda: "gull" in page.text(".ref:nth-child(2)"))
    page.click(".ref:nth-child(1) [data-act=remove]")
    page.until(lambda: len(page.all(".ref")) == 2)
    assert [tag.text for tag in page.all(".tag")] == ["<Picture 1>", "<Audio 1>"]


def test_a_tag_is_inserted_at_the_cursor(page: Page, files: dict[str, Path]) -> None:
    page.upload(files["boat.png"])
    page.js("const a=document.querySelector('#prompt textarea');a.focus();a.setSelectionRange(1,1)")
    page.click(".tag")
    value = page.js("return document.querySelector('#prompt textarea').value")
    assert value.startswith("A <Picture 1> small boat")


def test_frames_snap_to_the_grid_and_the_page_says_so(page: Page) -> None:
    page.fill("#frames input", "30")
    page.until(lambda: page.js("return document.querySelector('#frames input').value") == "39")
    page.until(lambda: "39 frames = 1.62 s at 24 fps" in page.text("#snap"))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("#size input", "100x64", "width and height must be multiples of 32, got 100x64"),
        ("#size input", "big", "size must be width x height like 960x544, got 'big'"),
        ("#steps input", "0", "steps must be 1 to 1000, got 0"),
        ("#seed textarea, #seed input", "x", "seed must be a whole number, got 'x'"),
    ],
)
def test_a_wrong_field_is_one_sentence_and_nothing_runs(
    page: Page, field: str, value: str, sentence: str
) -> None:
    page.fill(field, value)
    page.click("#go")
    page.until(lambda: sentence in page.text(".alert"))
    assert page.state() not in ("running", "queued")


def test_a_text_named_png_is_refused_by_name(page: Page, files: dict[str, Path]) -> None:
    page.all("input[type=file]")[0].send_keys(str(files["words.png"]))
    page.until(lambda: page.text(".alert"))
    alert = page.text(".alert")
    assert "words.png" in alert and "/tmp" not in alert
    assert page.all(".ref") == []


def test_a_run_can_be_cancelled(page: Page) -> None:
    page.fill("#steps input", "1000")
    page.click("#go")
    page.until(lambda: page.state() == "running")
    page.until(lambda: not page.js("return document.querySelector('#stop').disabled"))
    page.click("#stop")
    page.until(lambda: page.state() == "cancelled")
    page.until(lambda: page.text(".chip-text").endswith("ready"))


def test_what_a_user_writes_is_never_run(page: Page, tmp_path: Path) -> None:
    attack = "<img src=x onerror=window.hit=1>${window.hit=1}{{window.hit=1}}"
    evil = tmp_path / "<img src=x onerror='window.hit=1'>.png"
    Image.new("RGB", (64, 64)).save(evil)
    page.fill("#prompt textarea", attack)
    page.upload(evil)
    page.fill("#seed textarea, #seed input", attack)
    page.click("#go")
    page.until(lambda: "seed must be a whole number" in page.text(".alert"))
    assert page.js("return window.hit") is None
