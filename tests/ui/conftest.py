"""A real console on the demo model and a headless Chromium that must not log an error."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `launch.py serve` with the plan of a fresh machine."""
    folder = tmp_path_factory.mktemp("console")
    command = [sys.executable, "launch.py", "serve", "--port", "0", "--runs", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            match = re.search(r"http://\S+", line)
            assert match, f"the console printed no address: {line!r}"
            yield match[0]
        finally:
            server.send_signal(signal.SIGINT)  # with the tab still open
            try:
                assert server.wait(30) == 0
            except subprocess.TimeoutExpired:
                server.kill()
                raise


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """One browser for all tests."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "the page tests need chromium and chromedriver: apt-get install chromium-driver"
        if "CI" in os.environ:  # .ci/run installs them: there a missing browser is a fault
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


class Page:
    """The console in one window of a given size."""

    def __init__(self, chrome: webdriver.Chrome, url: str) -> None:
        self.chrome = chrome
        self.url = url

    def open(self, *, width: int = 1440, theme: str = "light") -> None:
        """Loads the page and waits until it can be used."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.chrome.get("about:blank")
        self.chrome.get_log("browser")
        self.chrome.get(f"{self.url}/?__theme={theme}")
        self.until(lambda: self.all("#go") and self.text(".chip-text").endswith("ready"))

    def until(self, met: Callable[[], Any], seconds: float = 60.0) -> Any:
        """The first true value of `met`."""
        deadline = time.monotonic() + seconds
        while not (value := met()):
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.05)
        return value

    def js(self, code: str, *args: Any) -> Any:
        """Runs a script in the page."""
        return self.chrome.execute_script(code, *args)

    def all(self, css: str) -> list[Any]:
        """Every element of a selector."""
        return self.chrome.find_elements("css selector", css)

    def text(self, css: str) -> str:
        """The visible text of the first element, "" if there is none."""
        return str(
            self.js("const e=document.querySelector(arguments[0]);return e?e.innerText:''", css)
        )

    def click(self, css: str) -> None:
        """Clicks an element where it stands."""
        self.js("document.querySelector(arguments[0]).click()", css)

    def fill(self, css: str, value: str) -> None:
        """Types a value into a field as a person would, then leaves it."""
        (field,) = self.all(css)
        field.send_keys("\ue009a\ue000", value, "\ue004")  # Ctrl-A, the value, Tab

    def upload(self, *paths: Path) -> None:
        """Adds references and waits until they are listed."""
        wanted = len(self.all(".ref")) + len(paths)
        self.all("input[type=file]")[0].send_keys("\n".join(map(str, paths)))
        self.until(lambda: len(self.all(".ref")) == wanted)

    def state(self) -> str:
        """The run's state."""
        return str(self.js("return document.querySelector('.run').dataset.state"))

    def shot(self, name: str) -> None:
        """Keeps a picture of the whole page for people (artifacts/ui, also in CI)."""
        folder = Path(os.path.relpath(ROOT / "artifacts" / "ui"))
        folder.mkdir(parents=True, exist_ok=True)
        self.chrome.save_screenshot(str(folder / f"{name}.png"))

    def errors(self) -> list[str]:
        """What the browser's console complained about."""
        return [e["message"] for e in self.chrome.get_log("browser") if e["level"] == "SEVERE"]


@pytest.fixture
def page(chromium: webdriver.Chrome, console: str) -> Iterator[Page]:
    """The page, which must not have logged an error when the test ends."""
    shown = Page(chromium, console)
    shown.open()
    yield shown
    assert shown.errors() == []
