"""What a browser remembers of the form: files that are gone since, and drafts that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ui.conftest import Page, Server

KEY = "h3:draft/local"


def kept(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.js("return localStorage.getItem(arguments[0])", KEY))
    return found


def come_back(page: Page, text: str) -> None:
    """Leaves the page, which saves its draft, puts another in its place and comes back."""
    page.chrome.get(f"{page.url}/api/v1/health")
    page.js("localStorage.setItem(arguments[0], arguments[1])", KEY, text)
    page.open()


def with_frame(page: Page, picture: Path) -> str:
    """LTX's form with a first frame; the id of that."""
    page.press(".families", "LTX-2.5")
    page.until(lambda: page.js("return document.querySelector('.form').dataset.family") == "ltx")
    page.all("input.pick-frame")[0].send_keys(str(picture))
    page.until(lambda: page.texts(".frame .ref-name") == [picture.name])
    page.until(lambda: page.js("return !!document.querySelector('.frame img')"))
    return str(page.js("return h3.draft.get().ltx_image.media"))


def test_a_first_frame_that_is_there_stays_in_the_form(page: Page, files: dict[str, Path]) -> None:
    with_frame(page, files["boat.png"])
    page.chrome.refresh()
    page.ready()
    page.until(lambda: page.js("return document.querySelector('.frame img')?.naturalWidth"))
    assert page.texts(".frame .ref-name") == ["boat.png"] and not page.texts("#part-ltx .load")


def delete(page: Page, console: Server, media: str) -> None:
    """Deletes a file while the page is left; its thumbnail would else come from the cache."""
    page.chrome.get(f"{page.url}/api/v1/health")
    console.api(f"/media/{media}", "DELETE")
    page.chrome.execute_cdp_cmd("Network.clearBrowserCache", {})


@pytest.mark.parametrize("width", [1440, 390])
def test_a_first_frame_that_was_deleted_is_taken_out_and_the_page_says_so(
    page: Page, console: Server, files: dict[str, Path], width: int
) -> None:
    page.open(width=width)
    media = with_frame(page, files["gull.png"])
    page.fill("#ltx-frames", "57")
    delete(page, console, media)
    page.open(width=width)
    told = page.until(lambda: page.texts("#part-ltx .load .load-name"))
    sentence = (
        "The first frame, gull.png, is no longer on this console and was taken out of the form; "
        "add the picture again."
    )
    assert told == [sentence] and not page.texts(".frame .ref")
    assert page.js("return 'image' in h3.form()") is False
    assert page.value("#ltx-frames") == "57"
    page.js("document.querySelector('#part-ltx').scrollIntoView()")
    page.shot(f"ltx_frame_gone_{width}_light")
    assert page.overflow() == []
    page.press("#part-ltx .load", "Dismiss the message about first frame")
    page.chrome.refresh()  # said once
    page.ready()
    page.until(lambda: page.value("#ltx-frames") == "57")
    assert not page.texts("#part-ltx .load")


def test_a_reference_that_was_deleted_keeps_its_place_and_is_marked(
    page: Page, console: Server, files: dict[str, Path]
) -> None:
    page.upload(files["gull.png"], files["bell.wav"])
    media = page.js("return h3.draft.get().references[0].media")
    delete(page, console, media)
    page.open()
    page.until(lambda: "no longer on this console" in page.text(".refs .ref.missing"))
    assert page.texts(".ref-tag") == ["<Picture 1>", "<Audio 1>"]
    assert len(page.all(".refs .ref.missing")) == 1


OWN = "to-be-deleted"


def saved_plan(console: Server, name: str) -> None:
    fields = {k: v for k, v in console.api("/plans/cpu")["fields"].items() if k != "name"}
    console.api(f"/plans/{name}", "PUT", fields | {"threads": 1})


def gone_plan_is_told(page: Page) -> None:
    told = page.until(lambda: page.text("#part-fit .plan-gone"))
    assert told == (
        f"Plan {OWN}, which was to be compared with, is no longer on this console and was taken "
        f"out of the form; choose another one under Compare with, or nothing."
    )
    assert page.value("#plan-b") == "" and page.text("#go") == "Generate"
    assert OWN not in page.js("return [...document.querySelector('#plan-b').options]"
                              ".map(o=>o.value)")  # fmt: skip
    page.until(lambda: page.text(".fit-rows").startswith("S = "))


@pytest.mark.parametrize("width", [1440, 390])
def test_a_plan_b_that_was_deleted_is_taken_out_and_the_page_says_so(
    page: Page, console: Server, width: int
) -> None:
    page.open(width=width)
    saved_plan(console, OWN)
    page.chrome.refresh()
    page.ready()
    page.choose("#plan-b", OWN)
    page.until(lambda: page.text("#go") == "Generate both")
    page.until(lambda: len(page.all(".fit .fit-top")) == 2)
    page.chrome.get(f"{page.url}/api/v1/health")
    assert kept(page)["plan_b"] == OWN
    console.api(f"/plans/{OWN}", "DELETE")
    page.open(width=width)
    gone_plan_is_told(page)
    page.js("document.querySelector('#part-fit').scrollIntoView()")
    page.shot(f"plan_b_gone_{width}_light")
    assert page.overflow() == []
    page.choose("#plan-b", "cpu")  # another choice: it has been read
    page.until(lambda: page.text("#part-fit .plan-gone") == "")
    page.choose("#plan-b", "")
    page.chrome.refresh()
    page.ready()
    page.until(lambda: page.text(".fit-rows").startswith("S = "))
    assert page.text("#part-fit .plan-gone") == "" and kept(page)["plan_b"] == ""


def test_a_plan_b_that_is_deleted_on_the_page_is_taken_out_too(page: Page, console: Server) -> None:
    saved_plan(console, OWN)
    page.chrome.refresh()
    page.ready()
    page.choose("#plan-b", OWN)
    page.until(lambda: len(page.all(".fit .fit-top")) == 2)
    console.api(f"/plans/{OWN}", "DELETE")
    page.js("h3.plans.refresh()")  # as the Backends panel does after Delete
    gone_plan_is_told(page)


@pytest.mark.parametrize(
    "text",
    [
        *("{half", "3", "null", '"draft"', "[1]", "{}", '{"references": 3}', '{"plan": {}}'),
        '{"family": ["ltx"], "plan": ""}',
    ],
)
def test_a_draft_that_is_none_is_as_if_there_were_no_draft(page: Page, text: str) -> None:
    first = page.js("return h3.form()")
    plan = page.value("#plan")
    come_back(page, text)
    page.until(lambda: page.value("#plan") == plan)
    assert page.js("return h3.form()") == first


def test_of_a_broken_draft_what_is_understood_is_kept(page: Page, files: dict[str, Path]) -> None:
    page.upload(files["boat.png"])
    page.fill("#prompt", "a bell rings")
    first = page.js("return h3.form()")
    page.chrome.get(f"{page.url}/api/v1/health")
    (good,) = kept(page)["references"]
    broken: dict[str, Any] = {
        "prompt": "a bell rings",
        "steps": 7,  # as text it would be one
        "width": None,
        "sampler": ["euler"],
        "keep_latents": "no",
        "negative_references": 1,
        "family": "toString",
        "plan": 5,
        "plans": ["cpu"],
        "plan_b": {},
        "editing": True,
        "seed": {"a": 1},
        "ltx_image": "boat.png",
        "ltx_width": [],
        "from_an_older_version": {"x": 1},
        "references": [
            None,
            3,
            {"kind": "image"},
            {"kind": "toString", "media": "a", "name": "b"},
            {"kind": ["image"], "media": "a", "name": "b"},
            {"kind": "image", "media": 3, "name": "b"},
            good | {"facts": {"width": "9", "height": 9, "fps": "x"}, "soundtrack": 3},
        ],
    }
    come_back(page, json.dumps(broken))
    page.until(lambda: page.texts(".ref-name") == ["boat.png"])
    page.until(lambda: page.text(".fit-rows").startswith("S = "))
    assert page.js("return h3.form()") == first
    draft = page.js("return h3.draft.get()")
    assert "from_an_older_version" not in draft and draft["ltx_image"] is None
    assert (draft["keep_latents"], draft["editing"], draft["plan_b"]) == (True, "", "")
    page.press(".families", "LTX-2.5")
    page.until(lambda: page.js("return h3.form().family") == "ltx")


def test_a_draft_of_ltx_with_a_broken_frame_still_opens(page: Page) -> None:
    page.press(".families", "LTX-2.5")
    page.fill("#ltx-frames", "57")
    for frame in ({"media": 3, "name": "x"}, {"media": "gone", "name": 5}, [], 3):
        page.chrome.get(f"{page.url}/api/v1/health")
        come_back(page, json.dumps(kept(page) | {"ltx_image": frame}))
        page.until(lambda: page.value("#ltx-frames") == "57")
        assert page.js("return h3.draft.get().ltx_image") is None
