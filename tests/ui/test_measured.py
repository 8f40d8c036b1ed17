"""Layouts and benchmarks of the Timing panel in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from app import measurements
from tests.measured import bench, ltx_bench, sweep
from tests.ui.conftest import Page, Server


@pytest.fixture(scope="module")
def both(console: Server) -> tuple[str, str]:
    """Ids of a sweep and of an older bench, newer than all that is published."""
    found = (sweep("2099-01-02T00:00:00Z"), bench("2099-01-01T00:00:00Z"))
    return tuple(measurements.keep(console.folder, one).stem for one in found)  # type: ignore[return-value]


def show(page: Page, id: str, **window: Any) -> None:
    page.open(**window)
    page.js("location.hash='timing'")
    page.until(lambda: page.js("return !!document.querySelector('.ms')?.dataset.one"))
    page.choose(".ms-one", id)
    page.until(lambda: page.js("return document.querySelector('.ms').dataset.one") == id)
    page.until(lambda: names(page))


def names(page: Page) -> list[str]:
    code = "return (document.querySelector('.ms-steps').data||[]).map(t=>t.name)"
    return list(page.js(code))


def rows(page: Page) -> list[list[str]]:
    code = (
        "return [...document.querySelectorAll('.ms-table tbody tr')]"
        ".map(r=>[...r.cells].map(c=>c.innerText))"
    )
    return list(page.js(code))


def test_the_newest_sweep_is_shown_with_all_its_figures(page: Page, both: tuple[str, str]) -> None:
    page.js("location.hash='timing'")
    page.until(lambda: page.js("return document.querySelector('.ms')?.dataset.one") == both[0])
    page.until(lambda: "scaling efficiency" in names(page))
    single, two, failed = rows(page)
    assert single == [
        "single",
        "2.200 s",
        "1.00x",
        "100.0 %",
        "0.00 ms, 0.0 %",
        "–",
        "–",
        "37.0 GiB",
        "–",
    ]
    assert two[:4] == ["U2", "1.250 s", "1.76x", "88.0 %"]
    assert two[4:7] == ["50.00 ms, 4.0 %", "30.00 ms", "0.190 s, 15.2 %"]
    assert two[7:] == ["34.0 GiB · 34.0 GiB", "3.10e-3 / equal"]
    assert failed == ["TP2", "failed: TP2: rank 1 ran out of memory"]
    assert "waiting for other ranks" in names(page)
    assert page.text(".ms-note").endswith(
        "Alone, GPU 0 takes 2.200 s a step. Alone, GPU 1 takes 2.260 s a step."
    )
    assert "20,094 packed rows" in page.text(".ms-shape")
    assert "torch" in page.js("return document.querySelector('.ms-conditions').textContent")


def test_a_bench_tells_how_much_longer_the_second_takes(page: Page, both: tuple[str, str]) -> None:
    show(page, both[1])
    assert page.text(".ms-ratio").startswith("A step of b takes 1.500 times as long as one of a")
    assert "scaling efficiency" not in names(page)
    assert [row[0] for row in rows(page)] == ["a", "b"]
    assert "Alone" not in page.text(".ms-note")


def test_a_bench_of_ltx_tells_its_stages_apart(console: Server, page: Page) -> None:
    show(page, measurements.keep(console.folder, ltx_bench("2098-01-01T00:00:00Z")).stem)
    said = page.text(".ms-ratio")
    assert said.startswith("A step of stage 1 of b takes 1.500 times as long as one of a (")
    assert "A step of stage 2 of b takes 1.250 times as long as one of a (" in said
    shown = [row[0] for row in rows(page)]
    assert shown[:2] == [f"{name}, stage 1 (1,248 + 101 tokens)" for name in "ab"]
    assert shown[2:] == [f"{name}, stage 2 (4,992 + 101 tokens)" for name in "ab"]
    words = page.text(".ms-shape")
    assert "LTX-2.5" in words and "8 + 3 steps" in words
    assert "packed rows" not in words and "undefined" not in words


def test_what_is_measured_meanwhile_appears(
    console: Server, page: Page, both: tuple[str, str]
) -> None:
    show(page, both[0])
    id = measurements.keep(console.folder, sweep("2099-01-03T00:00:00Z")).stem
    page.js("location.hash='runs'")
    page.js("location.hash='timing'")
    page.until(lambda: page.js("return document.querySelector('.ms').dataset.one") == id)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_is_not_wider_than_the_window(
    page: Page, both: tuple[str, str], width: int, theme: str
) -> None:
    show(page, both[0], width=width, theme=theme)
    page.js("document.querySelector('.ms').scrollIntoView()")
    page.shot(f"{width}_{theme}_measured")
    assert page.overflow() == []
