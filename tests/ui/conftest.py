"""A real console on the demo model and a headless Chromium that must not log an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]


class Server:
    """`launch.py serve` on a runs folder; it can be stopped, killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Serves, on the port of the last time if there was one."""
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "launch.py", "serve", "--port", port, "--runs", str(self.folder)]
        command += self._options
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"http://[^\s/]+", line)
        assert match, f"the console printed no address: {line!r}"
        self.url = match[0]
        with suppress(urllib.error.HTTPError):  # 401: the sign-in page of a console with users
            # The address is printed before the page is built: this waits for it.
            urllib.request.urlopen(self.url, timeout=120).close()

    def stop(self) -> None:
        """Ctrl-C, also with a tab still open; it must end by itself and well."""
        assert self._process is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGINT)
        try:
            assert self._process.wait(30) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def api(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """JSON of /api/v1<path>, as a program would ask."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.url}/api/v1{path}", data=data, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def clear(self) -> None:
        """No open job and a queue that runs."""
        for job in self.api("/jobs?state=queued,running,cancelling")["jobs"]:
            if job["state"] != "cancelling":
                self.api(f"/jobs/{job['id']}/cancel", "POST")
        self.api("/jobs/queue", "POST", {"paused": False})
        deadline = time.monotonic() + 30
        while self.api("/jobs?state=queued,running,cancelling")["jobs"]:
            assert time.monotonic() < deadline, "jobs that were cancelled did not end"
            time.sleep(0.05)


@pytest.fixture(scope="session")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The console with the plan of a fresh machine, on a runs folder of its own."""
    server = Server(tmp_path_factory.mktemp("console"))
    server.start()
    yield server
    server.stop()


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
    chrome.set_page_load_timeout(60)  # under the client's own 120 s: one test fails, not the next
    yield chrome
    chrome.quit()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """References that a person may have at hand, and a text that is named like a picture."""
    folder = tmp_path_factory.mktemp("references")
    found = {name: folder / name for name in ("boat.png", "gull.png", "bell.wav", "words.png")}
    Image.fromarray(np.full((64, 96, 3), (30, 90, 160), np.uint8)).save(found["boat.png"])
    Image.fromarray(np.full((96, 64, 3), (200, 200, 190), np.uint8)).save(found["gull.png"])
    found["words.png"].write_text("this is no picture")
    with wave.open(str(found["bell.wav"]), "wb") as sound:
        sound.setparams((2, 2, 32000, 0, "NONE", ""))
        sound.writeframes(np.random.default_rng(0).integers(-99, 99, 64000, np.int16).tobytes())
    return found


class Page:
    """The console in one window of a given size."""

    def __init__(self, chrome: webdriver.Chrome, url: str) -> None:
        self.chrome = chrome
        self.url = url

    def open(self, *, width: int = 1440, theme: str = "light", tab: str = "") -> None:
        """Loads the page and waits until it can be used."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.chrome.get("about:blank")
        self.chrome.get_log("browser")
        self.chrome.get(f"{self.url}/?__theme={theme}{'#' + tab if tab else ''}")
        self.ready()

    def ready(self) -> None:
        """Waits until the engine of a page that is loading takes requests."""
        self.until(
            lambda: self.js("return !!(window.h3 && h3.jobs && h3.jobs.loaded && h3.session)")
        )
        idle = ("ready", "working", "not loaded")  # a parity run leaves the engine unloaded
        self.until(lambda: self.text(".chip-text").endswith(idle), seconds=90)

    def forget(self) -> None:
        """Leaves the page and all that the browser remembers of it."""
        self.chrome.get("about:blank")  # a page that is left saves its draft
        where = {"origin": self.url, "storageTypes": "local_storage"}
        self.chrome.execute_cdp_cmd("Storage.clearDataForOrigin", where)
        # What the left page saved may arrive after that: a small page of the origin clears it too.
        self.chrome.get(f"{self.url}/api/v1/health")
        self.js("localStorage.clear()")
        self.chrome.get("about:blank")

    def until(self, met: Callable[[], Any], seconds: float = 30.0) -> Any:
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

    def texts(self, css: str) -> list[str]:
        """The visible text of every element."""
        code = "return [...document.querySelectorAll(arguments[0])].map(e=>e.innerText)"
        return list(self.js(code, css))

    def value(self, css: str) -> str:
        """What a field holds."""
        return str(self.js("return document.querySelector(arguments[0]).value", css))

    def click(self, css: str) -> None:
        """Clicks an element where it stands."""
        self.js("document.querySelector(arguments[0]).click()", css)

    def press(self, css: str, words: str) -> None:
        """Clicks the button below a selector that shows these words, or is named by them."""
        code = (
            "const b=[...document.querySelectorAll(arguments[0]+' button')].find(b=>"
            "b.innerText===arguments[1]||b.getAttribute('aria-label')===arguments[1]);"
            "if(!b||b.disabled||!b.offsetParent)return false;b.click();return true"
        )
        self.until(lambda: self.js(code, css, words))

    def fill(self, css: str, value: str) -> None:
        """Types a value into a field as a person would, then leaves it."""
        (field,) = self.all(css)
        field.send_keys("\ue009a\ue000", value, "\ue004")  # Ctrl-A, the value, Tab

    def choose(self, css: str, value: str) -> None:
        """Takes an option of a <select>."""
        code = (
            "const s=document.querySelector(arguments[0]);s.value=arguments[1];"
            "if(s.value!==arguments[1])return false;"
            "s.dispatchEvent(new Event('change',{bubbles:true}));return true"
        )
        self.until(lambda: self.js(code, css, value))

    def upload(self, *paths: Path) -> None:
        """Adds references and waits until they are listed."""
        wanted = len(self.all(".ref")) + len(paths)
        self.all("input.pick")[0].send_keys("\n".join(map(str, paths)))
        self.until(lambda: len(self.all(".ref")) == wanted)

    def state(self) -> str:
        """The state of the job in the result card."""
        return str(self.js("return document.querySelector('.run').dataset.state"))

    def generate(self, css: str = "#part-go", words: str = "Generate") -> str:
        """Presses a button that queues a job; returns the id of that job."""
        known = "return h3.jobs.all().map(j=>j.id)"
        before = set(self.js(known))
        self.press(css, words)
        return str(self.until(lambda: set(self.js(known)) - before).pop())

    def ends(self, id: str, state: str = "done") -> None:
        """Waits until the result card shows that a job ended so."""
        shown = "const d=document.querySelector('.run').dataset;return [d.id,d.state]"
        self.until(lambda: self.js(shown) == [id, state])

    def queue(self) -> list[str]:
        """The ids of the queue card's open jobs, in order."""
        return list(
            self.js("return [...document.querySelectorAll('.jobs.open .job')].map(e=>e.dataset.id)")
        )

    def shot(self, name: str) -> None:
        """Keeps a picture of the whole page for people (artifacts/ui, also in CI)."""
        folder = Path(os.path.relpath(ROOT / "artifacts" / "ui"))
        folder.mkdir(parents=True, exist_ok=True)
        self.chrome.save_screenshot(str(folder / f"{name}.png"))

    def overflow(self) -> list[str]:
        """Classes of what reaches beyond the window, outside areas that scroll by themselves."""
        code = (
            "const scrolls=e=>{for(let p=e.parentElement;p&&p!==document.body;p=p.parentElement)"
            "if(['auto','scroll'].includes(getComputedStyle(p).overflowX))return true;"
            "return false};"
            "const wide=[...document.querySelectorAll('body *')].filter(e=>e.offsetParent&&"
            "e.getBoundingClientRect().right>innerWidth+1&&!scrolls(e)).map(e=>e.className);"
            "if(document.documentElement.scrollWidth>innerWidth)wide.unshift('the page');"
            "return wide.slice(0,5).map(String)"
        )
        return list(self.js(code))

    def errors(self) -> list[str]:
        """What the browser's console complained about."""
        return [e["message"] for e in self.chrome.get_log("browser") if e["level"] == "SEVERE"]


@pytest.fixture
def page(chromium: webdriver.Chrome, console: Server) -> Iterator[Page]:
    """The page of a browser that was never here; it must not have logged an error at the end."""
    console.clear()
    shown = Page(chromium, console.url)
    shown.forget()
    shown.open()
    yield shown
    assert shown.errors() == []
