"""The Timing panel in a real browser over the real demo model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ui.conftest import Page, Server
from tests.ui.made import done, ended, enqueue


@pytest.fixture(scope="module")
def two(console: Server) -> tuple[str, str]:
    """Ids of two done runs: 3 and 4 steps."""
    return done(console, "timed", steps=3), done(console, "timed", steps=4)


def bars(page: Page, css: str) -> list[dict[str, Any]]:
    """Name and y of every trace that a plot draws."""
    code = (
        "const d=document.querySelector(arguments[0]);"
        "return (d.data||[]).map(t=>({name:t.name,y:[...t.y]}))"
    )
    return list(page.js(code, css))


def show(page: Page, id: str, **window: Any) -> None:
    page.open(**window)
    page.js("location.hash=arguments[0]", f"timing/{id}")
    page.until(lambda: page.js("return document.querySelector('.tm')?.dataset.run") == id)
    page.until(lambda: bars(page, ".tm-steps"))


def test_a_stored_run_shows_its_stages_steps_and_columns(page: Page, two: tuple[str, str]) -> None:
    show(page, two[0])
    assert {"text encode", "denoise", "mux"} <= {b["name"] for b in bars(page, ".tm-fall")}
    steps = bars(page, ".tm-steps")
    assert [b["name"] for b in steps] == ["attention", "GEMM", "communication", "other"]
    assert all(len(b["y"]) == 3 for b in steps)
    names = [cell.text for cell in page.all(".tm-table tbody th")]
    assert names[0] == "load\nonce per engine start"
    assert names[4] == "per step\nmedian of the steps"
    assert names[-2:] == ["E2E", "peak memory"]
    reference = page.all(".tm-table tbody tr")[names.index("reference encode")]
    assert reference.text == "reference encode not measured"
    assert "96x64" in page.text(".tm-shape") and "3 steps" in page.text(".tm-shape")


def test_a_pinned_run_is_what_others_are_set_against(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    show(page, two[0])
    page.click(".tm-pin")
    page.until(lambda: console.api("/runs/baseline")["id"] == two[0])
    page.until(lambda: page.text(".tm-base") == "This run is the baseline.")
    show(page, two[1])  # a new page: the pin is kept by the console
    page.until(lambda: "this run" in page.text(".tm-table thead"))
    assert "Its shape is another one (steps)" in page.text(".tm-base")
    assert "baseline, whole step" in {b["name"] for b in bars(page, ".tm-steps")}
    cells = page.js(
        "const rows=[...document.querySelectorAll('.tm-table tbody tr')];"
        "return [...rows.find(r=>r.cells[0].innerText==='E2E').cells].map(c=>c.innerText)"
    )
    now, base = (dict(console.api(f"/runs/{id}/timings")["columns"])["E2E"] for id in two[::-1])
    assert cells[4].endswith("%")
    sign = "+" if now > base else "−"
    assert cells[3].startswith(sign) and cells[4].startswith(sign)
    page.shot("1440_light_timing_baseline")
    page.click(".tm-pin")  # this one instead
    page.until(lambda: console.api("/runs/baseline")["id"] == two[1])
    page.until(lambda: page.text(".tm-pin") == "Unpin")  # the answer has reached the page too
    page.click(".tm-pin")
    page.until(lambda: console.api("/runs/baseline")["id"] == "")


def test_a_steady_stream_of_events_does_not_hold_up_the_list(
    page: Page, two: tuple[str, str]
) -> None:
    page.js("location.hash='timing'")
    page.until(lambda: page.js("return document.querySelector('.tm')?.dataset.run"))
    page.js(
        "const api=h3.api;window.asked=0;window.sent=0;"
        "h3.api=(path,...rest)=>{if(path.startsWith('/runs?'))asked+=1;return api(path,...rest)};"
        "const job={...h3.jobs.get(arguments[0]),state:'running'};"
        "setInterval(()=>{sent+=1;h3.emit('job',{...job,done:sent})},50)",
        two[0],
    )
    page.until(lambda: page.js("return sent") >= 60)  # three seconds, never quiet for 150 ms
    assert page.js("return asked") >= 2


def test_a_running_job_is_followed_step_by_step(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    page.js("location.hash='timing'")
    page.until(lambda: page.js("return document.querySelector('.tm')?.dataset.run"))
    id = enqueue(console, "followed", steps=1000)
    page.until(lambda: page.js("return document.querySelector('.tm').dataset.run") == id)
    page.until(lambda: page.text(".tm-live") == "live")
    page.until(lambda: page.text(".tm-facts dd") == "not yet")  # end to end
    seen = set()

    def grown() -> bool:
        if page.js("return document.querySelector('.tm').dataset.run") == id:
            seen.update(len(b["y"]) for b in bars(page, ".tm-steps")[:1])
        return len(seen) >= 3

    page.until(grown)
    axis = page.js("return document.querySelector('.tm-steps').layout.xaxis.range")
    assert axis[1] == pytest.approx(1000.6)  # all that was asked for, so that bars stay in place
    console.api(f"/jobs/{id}/cancel", "POST")
    ended(console, id)
    page.until(lambda: page.js("return document.querySelector('.tm-live').hidden"))
    stages = console.api(f"/runs/{id}/timings")["stages"]
    steps = sum(stage["stage"] == "attention" for stage in stages)
    page.until(lambda: len(bars(page, ".tm-steps")[0]["y"]) == steps)


def test_the_parts_of_the_slowest_rank_add_up_to_its_step(console: Server, page: Page) -> None:
    id = done(console, "two ranks", steps=3)
    path = console.folder / id / "run.json"
    record = json.loads(path.read_text())
    stages = [s for s in record["stages"] if s["step"] >= 0]
    for rank, factors in ((0, {"denoise": 2.0, "attention": 9.0}), (1, {"denoise": 2.5})):
        for s in stages:
            longer = s["seconds"] * factors.get(s["stage"], 1.0)
            record["stages"] += [{**s, "rank": rank + 1, "seconds": longer}]
    path.write_text(json.dumps(record))
    show(page, id)
    single = {n: [s["seconds"] for s in stages if s["stage"] == n] for n in ("attention", "GEMM")}
    shown = {b["name"]: b["y"] for b in bars(page, ".tm-steps")}
    assert shown["attention"] == single["attention"] and shown["GEMM"] == single["GEMM"]
    page.choose(".tm-rank", "1")
    page.until(lambda: bars(page, ".tm-steps")[0]["y"] == [9.0 * x for x in single["attention"]])


def test_a_run_of_two_ranks_shows_the_steps_and_tiles_of_both(console: Server, page: Page) -> None:
    fields = {k: v for k, v in console.api("/plans/cpu")["fields"].items() if k != "name"}
    console.api("/plans/two", "PUT", fields | {"layout": "U2", "threads": 1})
    tall = {"width": 64, "height": 288, "frames": 22, "steps": 3, "prompt": "two ranks of U2"}
    (job,) = console.api("/jobs", "POST", {"request": tall, "plans": ["two"]})["jobs"]
    assert ended(console, job["id"])["state"] == "done"
    show(page, job["id"])
    rows = page.js("return document.querySelector('.tm-fall').layout.yaxis.categoryarray")
    assert {"denoise · 0", "denoise · 1", "video VAE decode · 1", "mux · 0"} <= set(rows)
    assert page.js("return [...document.querySelector('.tm-rank').options].length") == 3
    page.choose(".tm-rank", "1")
    page.until(lambda: len(bars(page, ".tm-steps")[0]["y"]) == 3)
    table = page.text(".tm-table")
    assert "per step: all communication" in table
    console.api("/plans/two", "DELETE")


def test_an_encode_from_the_cache_is_no_gain(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    again = done(console, "timed again", steps=3)
    for id, seconds in ((two[0], 61.2), (again, 0.1)):
        path = console.folder / id / "run.json"
        record = json.loads(path.read_text())
        encode = next(s for s in record["stages"] if s["stage"] == "text encode")
        encode["seconds"] = seconds
        path.write_text(json.dumps(record))
    page.js("location.hash=arguments[0]", f"runs/{again}..{two[0]}")
    cells = (
        "const r=[...document.querySelectorAll('.rv-delta tbody tr')]"
        ".find(r=>r.cells[0].innerText==='text encode');"
        "return r?[...r.cells].map(c=>c.innerText):[]"
    )
    page.until(lambda: page.js(cells))
    assert page.js(cells) == ["text encode", "0.100 s, from the cache", "61.200 s", "", "", ""]


def test_both_exports_are_linked(page: Page, two: tuple[str, str]) -> None:
    show(page, two[0])
    links = [link.get_attribute("href") for link in page.all(".tm:not(.ms) a[download]")]
    assert links == [f"{page.url}/api/v1/runs/{two[0]}/timings{end}" for end in ("", ".csv")]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_timing_is_not_wider_than_the_window(
    page: Page, two: tuple[str, str], width: int, theme: str
) -> None:
    show(page, two[1], width=width, theme=theme)
    page.shot(f"{width}_{theme}_timing")
    assert page.overflow() == []
