"""The Backends panel in a browser: what the machine can run, a saved plan, A against B."""

from __future__ import annotations

from urllib.error import HTTPError

import pytest

from runtime.layouts import LAYOUTS
from tests.ui.conftest import Page, Server

OWN = "fast-threads"
TINY = {
    "prompt": "two plans",
    "width": 64,
    "height": 64,
    "frames": 22,
    "steps": 2,
}


def probed(page: Page) -> None:
    """Opens the panel and waits until the machine has been probed."""
    page.js("h3.go('layout')")
    page.until(lambda: "probed" in page.text(".ly-when") and page.all(".ly-backend"), 120)


def whole(page: Page, name: str, width: int) -> None:
    """A picture of the whole panel."""
    height = page.js("return document.documentElement.scrollHeight")
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.shot(name)


def forget_plan(console: Server, name: str) -> None:
    try:
        console.api(f"/plans/{name}", "DELETE")
    except HTTPError as error:
        assert error.code == 404


def test_every_backend_says_whether_it_runs_here_and_what_is_validated(page: Page) -> None:
    probed(page)
    cards = dict(
        zip(
            page.js("return [...document.querySelectorAll('.ly-backend')].map(e=>e.dataset.name)"),
            page.texts(".ly-backend"),
            strict=True,
        )
    )
    assert {"sdpa", "sage2", "nvfp4_native", "int8_convrot", "kitchen"} <= set(cards)
    assert "available" in cards["sdpa"] and "torch" in cards["sdpa"]
    assert "needs a CUDA device" in cards["sdpa_cudnn"] and "lossy" in cards["sage2"]
    assert "CPU goldens\nbit-equal" in cards["nvfp4_dequant"]
    here, beyond = page.texts(".ly-layout")  # this machine has no GPU
    assert here.split() == ["available", "CPU"]
    assert beyond.startswith("not here") and "this machine has 0 CUDA GPUs" in beyond
    names = page.texts(".ly-layout-name")
    assert names[:3] == ["CPU", "single1 GPU", "U22 GPUs"] and len(names) == len(LAYOUTS) + 1


def test_a_run_of_a_backend_is_counted_on_its_card(page: Page, console: Server) -> None:
    id = console.api("/jobs", "POST", {"request": TINY, "plans": ["cpu"]})["jobs"][0]["id"]
    page.until(lambda: console.api(f"/jobs/{id}")["state"] == "done", 90)
    probed(page)
    page.until(lambda: "ran" in page.text(".ly-backend[data-name=sdpa] .ly-here"))
    assert page.text(".ly-backend[data-name=sage2] .ly-here").endswith(
        "not validated on this machine"
    )


def test_a_plan_is_changed_checked_saved_used_and_deleted(page: Page, console: Server) -> None:
    forget_plan(console, OWN)
    probed(page)
    page.choose(".ly-base", "cpu")
    assert page.text(".ly-differs .ly-changes") == "nothing yet"
    page.click(".ly-group[data-group=Process] summary")
    page.fill("[data-plan=threads]", "1")
    page.click(".ly-group[data-group=Layers] summary")
    page.fill("[data-plan=row_split]", "1:")
    page.fill(".ly-name", OWN)
    page.press(".ly", "Save plan")
    page.until(lambda: "row_split must be numbers above 0" in page.text(".ly-plan-alert"))
    assert any("400" in line for line in page.errors())  # the browser tells of every refusal
    page.fill("[data-plan=row_split]", " 9984:10110 ")
    page.choose("[data-plan=text_encoder]", "stream")
    changes = page.text(".ly-differs .ly-changes")
    assert "CPU threads" in changes and "stream" in changes
    assert "Split of rows\nempty\n→ 9984:10110" in changes.replace(" →", "\n→")
    page.press(".ly", "Check")
    page.until(lambda: "packed rows" in page.text(".ly-verdict"))
    page.fill(".ly-name", OWN)
    page.press(".ly", "Save plan")
    page.until(lambda: page.text(".ly-origin") == "user")
    saved = console.api(f"/plans/{OWN}")["fields"]
    assert (saved["threads"], saved["text_encoder"]) == (1, "stream")
    assert saved["row_split"] == "9984:10110"
    page.press(".ly", "Use for Generate")
    page.until(lambda: page.js("return h3.draft.get().plan") == OWN)
    page.js("h3.go('layout')")
    page.press(".ly", "Delete")
    page.until(lambda: page.text(".ly-origin") == "preset")
    assert OWN not in [plan["name"] for plan in console.api("/plans")["plans"]]


def test_a_name_that_a_preset_has_is_refused_in_words(page: Page) -> None:
    probed(page)
    page.choose(".ly-base", "cpu")
    page.fill(".ly-name", "h200x1_sdpa")
    page.press(".ly", "Save plan")
    page.until(lambda: "is the name of a preset plan" in page.text(".ly-plan-alert"))
    assert any("409" in line for line in page.errors())  # the browser tells of every refusal
    for name in ("../x y", ""):
        page.fill(".ly-name", name or "\ue003")
        page.press(".ly", "Save plan")
        page.until(lambda name=name: page.text(".ly-plan-alert").endswith(f"; got '{name}'"))  # type: ignore[misc]


def test_a_field_of_another_is_there_while_that_one_has_its_value(page: Page) -> None:
    probed(page)
    page.choose(".ly-base", "cpu")
    assert not page.all("[data-plan=cache_warmup]") and not page.all("[data-plan=sol_tau]")
    page.choose("[data-plan=cache]", "h3_cache")
    page.choose("[data-plan=attention]", "sol")
    assert page.all("[data-plan=cache_warmup]") and page.all("[data-plan=sol_tau]")
    assert len(page.all(".ly-lossy")) >= 2
    page.choose("[data-plan=cache]", "off")
    assert not page.all("[data-plan=cache_warmup]")


def test_a_number_out_of_its_range_is_refused_in_a_sentence_until_it_is_right(
    page: Page, console: Server
) -> None:
    forget_plan(console, OWN)
    probed(page)
    page.choose(".ly-base", "cpu")
    page.choose("[data-plan=cache]", "h3_cache")
    page.fill(".ly-name", OWN)
    for typed in ("2.5", "1001", "some"):
        page.fill("[data-plan=cache_warmup]", typed)
        said = f"Cache warm-up must be a whole number from 0 to 1000, got {typed}."
        assert page.text(".wrong .ly-help") == said
        page.press(".ly", "Save plan")
        page.until(lambda said=said: page.text(".ly-plan-alert") == said)  # type: ignore[misc]
    page.fill("[data-plan=cache_warmup]", "2")
    page.press(".ly", "Save plan")
    page.until(lambda: page.text(".ly-origin") == "user")
    assert console.api(f"/plans/{OWN}")["fields"]["cache_warmup"] == 2
    console.api(f"/plans/{OWN}", "DELETE")


def test_plan_b_is_one_that_this_machine_can_run(page: Page, console: Server) -> None:
    """Without a GPU and without other plans that is A again, and it says what that shows."""
    forget_plan(console, OWN)
    probed(page)
    runs = [p for p in console.api("/plans")["plans"] if p["runs"]]
    assert [p["name"] for p in runs if p["fields"]["family"] == "h3"] == ["cpu"]
    page.until(lambda: page.value(".ly-b") == "cpu")
    assert page.text(".ly-between") == "the same plan twice: only noise of the clock"
    plan = {k: v for k, v in console.api("/plans/cpu")["fields"].items() if k != "name"}
    console.api(f"/plans/{OWN}", "PUT", plan | {"threads": 1})
    page.forget()
    page.open()
    probed(page)
    page.until(lambda: page.value(".ly-b") == OWN)
    console.api(f"/plans/{OWN}", "DELETE")


def test_two_plans_are_queued_together_and_compared(page: Page, console: Server) -> None:
    plan = console.api("/plans/cpu")["fields"]
    fields = {key: value for key, value in plan.items() if key != "name"}
    console.api(f"/plans/{OWN}", "PUT", fields | {"threads": 1})
    page.js("h3.draft.set(arguments[0])", {k: str(v) for k, v in TINY.items()})
    probed(page)
    page.until(lambda: page.text(".ly-request").startswith("64x64, 22 frames, 2 steps"))
    page.choose(".ly-a", "cpu")
    page.choose(".ly-b", OWN)
    assert "CPU threads" in page.text(".ly-between")
    page.press(".ly", "Queue both")
    page.until(lambda: len(page.all(".ly-pair")) == 1)
    page.until(lambda: page.all(".ly-compare"), 120)
    done = console.api("/jobs?state=done")["jobs"]
    ours = [job for job in done if job["group"]]
    assert {job["plan"] for job in ours} == {"cpu", OWN}
    assert len({job["seed"] for job in ours}) == 1
    page.click(".ly-compare")
    page.until(lambda: page.js("return location.hash").startswith("#runs/"))
    console.api(f"/plans/{OWN}", "DELETE")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_panel_fits_the_window(page: Page, width: int, theme: str) -> None:
    page.open(width=width, theme=theme, tab="layout")
    page.until(lambda: "probed" in page.text(".ly-when") and page.all(".ly-backend"), 120)
    page.choose(".ly-base", "rtxpro6000x1_sage2")
    page.choose("[data-plan=attention]", "sdpa")
    assert page.overflow() == []
    whole(page, f"layout_{width}_{theme}", width)
