"""The shell of the page in a real browser: tabs, themes, sizes, speed, and what it loads."""

from __future__ import annotations

import time
from functools import partial

import pytest

from panels import PANELS
from tests.ui.conftest import Page

INTERACTIVE_SECONDS = 3.0
TITLE = "Video console"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_no_tab_is_wider_than_the_window(page: Page, width: int, theme: str) -> None:
    shown = "const e=document.getElementById('tab-'+arguments[0]);return !!e&&!!e.offsetParent"
    page.open(width=width, theme=theme)
    for tab in PANELS:
        page.js("h3.go(arguments[0])", tab)
        page.until(partial(page.js, shown, tab))
        time.sleep(0.5)  # what a panel asks for when it opens has come
        page.shot(f"{tab}_{width}_{theme}")
        assert page.overflow() == [], tab


def test_the_title_is_that_of_the_console_and_of_no_family(page: Page) -> None:
    """Both families are used on this page, with an LTX plan too."""
    page.press(".families", "LTX-2.5")
    page.until(lambda: page.value("#plan") == "ltx_cpu")
    assert page.chrome.title == page.text(".head-name") == TITLE


def test_the_tab_is_kept_in_the_address(page: Page) -> None:
    last = PANELS[-1]
    page.click(f".tab[data-tab='{last}']")
    page.until(lambda: page.js("return location.hash") == f"#{last}")
    page.chrome.refresh()
    page.ready()
    page.until(lambda: page.all(f".tab[data-tab='{last}'][aria-selected='true']"))
    page.chrome.back()
    page.until(lambda: page.all(".tab[data-tab='generate'][aria-selected='true']"))


def test_the_chosen_theme_is_remembered(page: Page) -> None:
    page.chrome.get(page.url)
    page.ready()
    before = page.js("return document.body.classList.contains('dark')")
    page.click(".theme")
    page.until(lambda: page.js("return document.body.classList.contains('dark')") != before)
    page.chrome.refresh()
    page.ready()
    assert page.js("return document.body.classList.contains('dark')") != before


def test_the_page_can_be_used_within_three_seconds(page: Page) -> None:
    took = []
    for _ in range(3):  # the best of three: the machine runs other tests too
        page.open()
        (mark,) = page.until(
            lambda: page.js("return performance.getEntriesByName('h3-ready').map(e=>e.startTime)")
        )
        took.append(mark / 1000)
    assert not page.js("return document.querySelector('#go').disabled")
    assert min(took) < INTERACTIVE_SECONDS, took


def test_everything_the_page_loads_comes_from_the_console(page: Page) -> None:
    names = page.js("return performance.getEntriesByType('resource').map(e=>e.name)")
    assert names and all(name.startswith((page.url, "data:", "blob:")) for name in names)


def test_plots_are_loaded_only_when_one_is_drawn(page: Page) -> None:
    loaded = (
        "return performance.getEntriesByType('resource').filter(e=>/plotly/.test(e.name)).length"
    )
    assert page.js(loaded) == 0
    page.js(
        "const d=document.createElement('div');d.id='probe';d.style.width='300px';"
        "document.body.append(d);h3.plot(d,[{x:[1,2],y:[3,4]}],{})"
    )
    page.until(lambda: page.js("return !!document.querySelector('#probe .main-svg')"))
    assert page.js(loaded) == 1


def test_an_idle_page_asks_for_nothing(page: Page) -> None:
    count = "return performance.getEntriesByType('resource').length"
    page.until(lambda: page.text(".fit-rows"))
    time.sleep(1.0)
    before = page.js(count)
    time.sleep(3.0)
    assert page.js(count) == before
