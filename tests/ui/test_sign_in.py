"""Signing in with a real browser, whose cookies and Origin headers no test client has."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver

from tests.ui.conftest import ROOT, Page
from tests.ui.test_page import TITLE

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a console with a user and a token."""
    runs = tmp_path_factory.mktemp("locked")
    command = [sys.executable, "launch.py", "serve", "--port", "0", "--runs", str(runs)]
    command += ["--auth", f"anna:{PASSWORD}", "--token", "a token of the tests"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        match = re.search(r"http://\S+", server.stdout.readline())
        assert match
        yield match[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


@pytest.fixture
def door(chromium: webdriver.Chrome, locked: str) -> Iterator[Page]:
    """The sign-in page, without any cookie."""
    page = Page(chromium, locked)
    chromium.get(f"{locked}/login")
    chromium.get_log("browser")
    yield page
    # A page left open would meet a 401 once its cookie is gone and reload itself, against the next
    # test's navigation: chromedriver can then wait for that load until its limit of minutes.
    chromium.get("about:blank")
    # delete_all_cookies deletes those of the page that is shown: here none. With its cookie the
    # next /login would lead to the console, whose loads the test then breaks off: errors.
    chromium.execute_cdp_cmd("Network.clearBrowserCookies", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def shown(page: Page, *, width: int, scheme: str) -> None:
    """Opens the front door in a window of this width and colour scheme."""
    metrics: dict[str, Any] = {"width": width, "height": 800, "deviceScaleFactor": 1}
    metrics["mobile"] = width < 500
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    page.chrome.get(f"{page.url}/")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_a_stranger_sees_the_sign_in_without_overflow(door: Page, width: int, scheme: str) -> None:
    shown(door, width=width, scheme=scheme)
    assert door.chrome.current_url.endswith("/login")
    assert (door.text("h1"), door.chrome.title) == (TITLE, f"Sign in · {TITLE}")
    assert door.js("return document.documentElement.scrollWidth") <= width
    door.shot(f"sign_in_{width}_{scheme}")
    assert door.errors() == []


def test_a_wrong_password_says_so_and_a_right_one_opens_the_page(door: Page) -> None:
    shown(door, width=1440, scheme="light")
    (name,), (password,) = door.all("[name=name]"), door.all("[name=password]")
    name.send_keys("<img src=x onerror=alert(1)>")
    password.send_keys("wrong password\ue007")
    door.until(lambda: "wrong user or password" in door.text(".why"))
    assert door.js("return document.querySelector('[name=name]').value").startswith("<img src=x")
    assert door.all("img") == []
    door.chrome.get_log("browser")  # the browser notes the status 403 of that page
    (name,), (password,) = door.all("[name=name]"), door.all("[name=password]")
    name.clear()
    name.send_keys("anna")
    password.send_keys(f"{PASSWORD}\ue007")
    door.until(lambda: door.all("#go"))
    assert door.js("return document.cookie") == ""
    time.sleep(1)  # late requests of the page
    assert door.errors() == []


def test_the_link_with_the_token_opens_the_page_and_hides_the_token(door: Page) -> None:
    door.chrome.get(f"{door.url}/?token=a%20token%20of%20the%20tests")
    door.until(lambda: door.all("#go"))
    assert "token" not in door.js("return location.href")
    assert door.errors() == []


def test_signing_out_leads_back_to_the_door(door: Page) -> None:
    door.chrome.get(f"{door.url}/?token=a%20token%20of%20the%20tests")
    door.until(lambda: door.all("#go"))
    door.until(lambda: "Sign out" in door.text("body"))
    (leave,) = [b for b in door.all("button, a") if b.text == "Sign out"]
    leave.click()
    door.until(lambda: door.chrome.current_url.endswith("/login"))
    door.chrome.get(f"{door.url}/")
    assert door.chrome.current_url.endswith("/login")
