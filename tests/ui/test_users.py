"""A console with two users: sign in, whose page it is, foreign jobs without words, sign out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.ui.conftest import Page, Server

PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    users = [word for name in ("ada", "bob") for word in ("--auth", f"{name}:{PASSWORD}")]
    server = Server(tmp_path_factory.mktemp("shared"), *users)
    server.start()
    yield server
    server.stop()


def _sign_in(page: Page, name: str) -> None:
    page.until(lambda: page.all("input[type=password]"))
    page.all("input[name=name]")[0].send_keys(name)
    page.all("input[type=password]")[0].send_keys(PASSWORD, "\ue007")
    page.ready()
    page.until(lambda: page.text(".who-name") == name)


def test_another_users_job_is_a_place_in_the_queue_and_no_more(
    chromium: webdriver.Chrome, shared: Server
) -> None:
    page = Page(chromium, shared.url)
    chromium.get("about:blank")
    chromium.get_log("browser")
    chromium.get(shared.url)
    _sign_in(page, "ada")
    page.press(".queue", "Pause")
    page.fill("#prompt", "nobody else may read this")
    page.generate()
    page.until(lambda: page.texts(".jobs.open .job-name") == ["nobody else may read this"])
    page.press(".head", "Sign out")
    _sign_in(page, "bob")
    page.until(lambda: page.texts(".jobs.open .job-name") == ["another user’s job"])
    assert page.all(".jobs.open .job-tools button") == []
    assert "nobody else" not in page.text("body") + page.value("#prompt")
    page.press(".queue", "Resume")
    page.until(lambda: "only an admin may pause the queue" in page.text(".queue .alert"))
    page.shot("users_1440_light")
    page.press(".head", "Sign out")
    page.until(lambda: page.all("input[type=password]"))
    # of the sign-in page, of bob's wish, and of the event stream, which a sign-out may cut
    expected = ("status of 401", "status of 403", "/api/v1/events")
    assert [e for e in page.errors() if not any(words in e for words in expected)] == []
