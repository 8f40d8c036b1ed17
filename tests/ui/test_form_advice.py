"""What the form says before a job is queued: tags without a reference, counting, which job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ui.conftest import Page, Server

_WATCH = (
    "window.asked=[];const send=window.fetch;"
    "window.fetch=(url,options)=>{if(!String(url).includes('/preflight'))return send(url,options);"
    "window.asked.push(options.body);return new Promise((done)=>setTimeout(done,900))"
    ".then(()=>send(url,options))};"
)


def _fit(page: Page) -> tuple[str, str, bool]:
    return tuple(
        page.js(
            "const f=document.querySelector('.fit');return [f.innerText,f.dataset.verdict,"
            "document.querySelector('.verdict').hidden]"
        )
    )


def test_references_that_are_not_counted_have_no_verdict(
    page: Page, files: dict[str, Path]
) -> None:
    page.until(lambda: page.text(".fit-rows").startswith("S = "))
    page.js(_WATCH)
    page.upload(files["boat.png"])
    assert _fit(page) == ("Measuring the references…", "", True)
    page.until(lambda: page.text(".fit-rows").startswith("S = "))
    assert _fit(page)[1:] == ("fits", False)


def test_a_reload_asks_only_about_the_draft_with_its_references(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"], files["gull.png"])
    page.until(lambda: page.text(".fit-rows").startswith("S = "))
    source = "Page.addScriptToEvaluateOnNewDocument"
    watch = page.chrome.execute_cdp_cmd(source, {"source": _WATCH})
    try:
        page.chrome.refresh()
        page.ready()
        page.until(lambda: page.text(".fit-rows").startswith("S = "))
        bodies = [json.loads(body) for body in page.js("return window.asked")]
    finally:
        page.chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", watch)
    assert bodies and all(len(body["request"]["references"]) == 2 for body in bodies)


def test_a_tag_that_stands_for_nothing_is_named(page: Page, files: dict[str, Path]) -> None:
    page.fill("#prompt", "a <Video 1> of <Picture 1>")
    page.until(lambda: page.text(".tag-note").endswith("stand for nothing: no reference is added."))
    page.upload(files["boat.png"])
    told = "<Video 1> in the prompt stands for nothing: there is <Picture 1>."
    page.until(lambda: page.text(".tag-note") == told)
    page.fill("#prompt", "a boat of <Picture 1>")
    page.until(lambda: page.text(".tag-note") == "")


def test_a_plan_of_the_cpu_needs_no_vram_and_the_mode_is_named(page: Page) -> None:
    page.until(lambda: page.texts(".fit-amount")[:1] == ["none needed"])
    assert page.text(".fit-mode").startswith("mode ")
    assert page.js("return document.querySelector('.fit-mode').title")


def test_advice_stands_in_the_card(page: Page) -> None:
    page.fill("#steps", "900")
    page.until(lambda: "783 of 900 steps will run" in page.text(".fit-warn"))


@pytest.mark.parametrize("width", [1440, 390])
def test_the_job_in_the_form_is_named_and_marked(page: Page, console: Server, width: int) -> None:
    page.open(width=width)
    console.api("/jobs/queue", "POST", {"paused": True})
    page.fill("#prompt", "a kite over the dunes <Picture 7>")
    page.fill("#steps", "900")
    job = page.generate()
    page.until(lambda: page.queue() == [job])
    page.press(".jobs.open", "Edit in the form")
    page.until(lambda: "job 1 of the queue, “a kite over the dunes" in page.text(".editing"))
    page.until(lambda: page.text(".job-editing") == "being edited")
    page.until(lambda: page.text(".fit-warn"))
    named = "return document.querySelector('.editing').getBoundingClientRect().top"
    page.until(lambda: 0 < page.js(named) < 900)
    page.shot(f"generate_editing_{width}_light")
    assert page.overflow() == []
    page.press("#part-go", "Discard")
    page.until(lambda: page.js("return document.querySelector('.editing').hidden"))
    page.until(lambda: not page.all(".job-editing"))
