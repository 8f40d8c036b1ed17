"""The Telemetry panel over made-up drivers: eight GPUs at work, one that is lost, none at all."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains

from tests.ui.conftest import ROOT, Page, Server

PLOTS = "[...document.querySelectorAll('.tl-plot')]"
RANGES = f"return {PLOTS}.filter(d=>d.layout).map(d=>d.layout.xaxis.range.map(Math.round).join())"

ZOOMED = "return !document.querySelector('.tl-live').hidden"


class GpuServer(Server):
    """The console over one case of tests.fake_gpu_console."""

    def __init__(self, folder: Path, case: str) -> None:
        super().__init__(folder)
        self.case = case

    def start(self) -> None:
        """Serves on any free port."""
        command = [sys.executable, "-m", "tests.fake_gpu_console", "--case", self.case]
        command += ["--runs", str(self.folder)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"http://[^\s/]+", line)
        assert match, f"the console printed no address: {line!r}"
        self.url = match[0]
        self.api("/health")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], GpuServer]]:
    """One console per case, started when it is first asked for."""
    servers: dict[str, GpuServer] = {}

    def serve(case: str) -> GpuServer:
        if case not in servers:
            servers[case] = GpuServer(tmp_path_factory.mktemp(case), case)
            servers[case].start()
        return servers[case]

    yield serve
    for server in servers.values():
        server.stop()


@pytest.fixture
def show(
    chromium: webdriver.Chrome, served: Callable[[str], GpuServer]
) -> Iterator[Callable[..., Page]]:
    """Opens the panel of a case; nothing may have been logged as an error when the test ends."""
    pages: list[Page] = []

    def opened(case: str, **how: Any) -> Page:
        page = Page(chromium, served(case).url)
        page.open(tab="telemetry", **how)
        page.until(lambda: page.all(".tl-plot .main-svg"))
        pages.append(page)
        return page

    yield opened
    for page in pages:
        assert page.errors() == []
        page.forget()


def plot(page: Page, title: str) -> str:
    """A selector of the plot with this title."""
    code = (
        "const c=[...document.querySelectorAll('.tl-card')]"
        ".find(c=>c.querySelector('.tl-title').firstChild.data===arguments[0]);"
        "c.scrollIntoView({block:'center'});c.querySelector('.tl-plot').id=arguments[1];"
    )
    id = f"plot-{title.lower().replace(' ', '-')}"
    page.js(code, title, id)
    page.until(lambda: page.js(f"return !!(document.getElementById('{id}').data||[]).length"))
    return f"#{id}"


@pytest.mark.parametrize(
    ("width", "theme"), [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")]
)
def test_eight_gpus_fit_the_window(show: Callable[..., Page], width: int, theme: str) -> None:
    page = show("busy", width=width, theme=theme)
    page.until(lambda: page.texts(".tl-big")[7:8] not in ([], ["–"]))
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert len(page.all(".tl-tile")) == 8
    assert page.js("return document.querySelectorAll(\".tl-topo td[data-kind='NV']\").length") == 56
    assert page.text(".tl-missing") == ""
    page.shot(f"telemetry_{width}_{theme}")


def test_a_zoom_holds_for_every_plot_and_survives_updates_until_back_to_now(
    show: Callable[..., Page],
) -> None:
    page = show("busy")
    page.until(lambda: len(page.js(RANGES)) >= 3)
    area = page.all(".tl-plot .nsewdrag")[1]
    page.chrome.execute_script("arguments[0].scrollIntoView({block:'center'})", area)
    drag = ActionChains(page.chrome).move_to_element(area).move_by_offset(-60, 0)
    drag.click_and_hold().move_by_offset(100, 0).release().perform()
    page.until(lambda: page.js(ZOOMED))
    page.until(lambda: len(set(page.js(RANGES))) == 1)
    zoomed = page.js(RANGES)
    seen = page.js("return document.querySelector('.tl-rest').innerText")
    page.until(lambda: page.js("return document.querySelector('.tl-rest').innerText") != seen)
    assert page.js(RANGES) == zoomed
    page.click(".tl-live")
    page.until(lambda: not page.js(ZOOMED) and page.js(RANGES) != zoomed)


def test_links_are_shown_one_by_one_once_their_box_is_opened(show: Callable[..., Page]) -> None:
    page = show("busy")
    assert not page.all(".tl-link")
    page.click(".tl-linksbox summary")
    page.until(lambda: len(page.all(".tl-link")) == 8 * 18)
    page.until(lambda: "GB/s sent" in (page.all(".tl-link")[0].get_attribute("title") or ""))
    assert "Read every ten seconds" in page.text(".tl-scale")
    page.click(".tl-linksbox summary")


def test_lines_that_are_no_gpu_and_limits_are_explained(show: Callable[..., Page]) -> None:
    page = show("busy")
    page.until(lambda: len(page.texts(".tl-title")) >= 9)
    titles = " ".join(page.texts(".tl-title"))
    assert "memory" in titles and titles.count("all GPUs") == 2  # NVLink and PCIe
    limit = (
        f"const d=document.querySelector('{plot(page, 'Power')}');"
        "return d&&d.layout&&(d.layout.annotations||[]).map(a=>a.text).join()"
    )
    page.until(lambda: "W per GPU" in (page.js(limit) or ""))


def test_pressing_a_tile_hides_that_gpus_line(show: Callable[..., Page]) -> None:
    page = show("busy")
    count = f"return document.querySelector('{plot(page, 'Utilisation')}').data.length"
    page.until(lambda: page.js(count) == 8)
    page.click(".tl-tile")
    page.until(lambda: page.js(count) == 7)
    assert page.all(".tl-tile")[0].get_attribute("aria-pressed") == "false"


def test_a_hidden_panel_rests_and_fills_the_gap_when_it_is_shown(show: Callable[..., Page]) -> None:
    page = show("busy")
    host = plot(page, "Host CPU")
    points = f"return document.querySelector('{host}').data[0].x"
    page.until(lambda: len(page.js(points)) >= 3)
    page.js("h3.go('generate')")
    time.sleep(1.5)
    asked = (
        "return performance.getEntriesByType('resource').filter(e=>/telemetry/.test(e.name)).length"
    )
    before, drawn = page.js(asked), page.js(points)
    time.sleep(5)
    assert (page.js(asked), page.js(points)) == (before, drawn)
    page.js("h3.go('telemetry')")
    page.js(f"document.querySelector('{host}').scrollIntoView({{block:'center'}})")
    page.until(lambda: page.js(points)[-1] > drawn[-1] + 4000)
    times = [t for t in page.js(points) if t >= drawn[-1]]
    assert max(b - a for a, b in itertools.pairwise(times)) < 4000


def test_runs_and_stages_are_marked(
    show: Callable[..., Page], served: Callable[[str], GpuServer]
) -> None:
    request = {"prompt": "boat", "width": 96, "height": 64, "frames": 22, "steps": 20}
    served("busy").api("/jobs", "POST", {"request": request, "plans": ["cpu"]})
    page = show("busy")
    page.until(lambda: page.js("return document.querySelector('.tl-lane').hidden") is False)
    names = "return (document.querySelector('.tl-stages').data||[]).map(t=>t.name)"
    page.until(lambda: "denoise" in page.js(names))
    shapes = f"return document.querySelector('{plot(page, 'Utilisation')}').layout.shapes.length"
    page.until(lambda: page.js(shapes) >= 3)  # the run begins, a stage begins, the run ends
    assert "a run begins or ends" in page.text(".tl-key")
    inner = (
        "const d=document.querySelector(arguments[0]),a=d._fullLayout.xaxis;"
        "const x=d.getBoundingClientRect().left+a._offset;return [x,x+a._length]"
    )
    lane, first = page.js(inner, ".tl-stages"), page.js(inner, plot(page, "Utilisation"))
    assert lane[0] == pytest.approx(first[0], abs=1)
    page.open(width=390, tab="telemetry")
    page.until(lambda: "denoise" in page.js(names))
    page.until(lambda: page.all(".tl-plot .main-svg"))
    lane, first = page.js(inner, ".tl-stages"), page.js(inner, plot(page, "Utilisation"))
    assert lane == pytest.approx(first, abs=1)
    assert page.overflow() == []
    page.shot("telemetry_390_light_run")
    page.open(tab="telemetry")
    page.until(lambda: "denoise" in page.js(names))
    page.until(lambda: page.all(".tl-plot .main-svg"))
    page.shot("telemetry_1440_light_run")


def test_a_gpu_lost_midway_is_said_and_the_others_go_on(show: Callable[..., Page]) -> None:
    page = show("lost")
    page.until(lambda: "GPU 1 does not answer any more" in page.text(".tl-lost"))
    tiles = [tile.get_attribute("data-lost") for tile in page.all(".tl-tile")]
    assert tiles == ["false", "true", "false"]
    numbers = page.texts(".tl-rest")
    page.until(lambda: page.texts(".tl-rest")[0] != numbers[0])
    page.shot("telemetry_1440_light_lost")


def test_what_a_gpu_does_not_report_has_no_plot_but_a_word(show: Callable[..., Page]) -> None:
    page = show("unified", theme="dark")
    page.until(lambda: "NVLink" in page.text(".tl-missing"))
    assert "PCIe (CPU and GPU share one memory)" in page.text(".tl-missing")
    assert "shared with the CPU" in page.text(".tl-memory")
    titles = page.js(
        "return [...document.querySelectorAll('.tl-card:not([hidden]) .tl-title')]"
        ".map(t=>t.firstChild.data)"
    )
    assert "Power" in titles and not {"NVLink", "PCIe"} & set(titles)
    page.shot("telemetry_1440_dark_unified")


def test_without_a_driver_one_sentence_and_the_host(show: Callable[..., Page]) -> None:
    page = show("none")
    said = page.text(".tl-none")
    assert said.startswith("No GPU to watch: this machine has no NVIDIA driver")
    titles = page.js("return [...document.querySelectorAll('.tl-title')].map(t=>t.firstChild.data)")
    assert titles == ["Host CPU", "Host RAM"]
    assert not page.all(".tl-tile")
    page.shot("telemetry_1440_light_none")


def test_ten_samples_a_second_can_be_asked_for(show: Callable[..., Page]) -> None:
    page = show("none")
    page.click(".tl-fast")
    page.until(lambda: "10 samples a second" in page.text(".tl-driver"))
    page.click(".tl-fast")
    page.until(lambda: "1 sample a second" in page.text(".tl-driver"))
