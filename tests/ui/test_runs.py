"""The Runs panel in a real browser: history, one run, and two players on each other."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.ui.conftest import Page, Server
from tests.ui.made import done, ended, enqueue

ATTACK = "<img src=x onerror=window.hit=1>${window.hit=1}{{window.hit=1}}"


@pytest.fixture(scope="module")
def two(console: Server) -> tuple[str, str]:
    """Ids of two done runs that differ in steps and seed-matched otherwise."""
    return done(console, "the same boat", steps=2), done(console, "the same boat", steps=4)


def go(page: Page, place: str, **window: Any) -> None:
    page.open(**window)
    page.js("location.hash=arguments[0]", place)
    page.until(lambda: page.all(".rv"))


def listed(page: Page) -> list[str]:
    return list(page.js("return [...document.querySelectorAll('.rv-card')].map(e=>e.dataset.id)"))


def compared(page: Page, two: tuple[str, str], **window: Any) -> None:
    go(page, f"compare/{two[0]}/{two[1]}", **window)
    pair = f"{two[0]}..{two[1]}"
    page.until(lambda: page.js("return document.querySelector('.rv-two').dataset.pair") == pair)
    page.until(lambda: page.js(f"{VIDEOS}return v.every(x=>x.readyState>=2 && !x.seeking)"))


VIDEOS = "const v=[...document.querySelectorAll('.ab video')];"


def frames(page: Page) -> list[int]:
    """The frame that each player shows."""
    return list(page.js(f"{VIDEOS}return v.map(x=>Math.floor(x.currentTime*24+0.01))"))


def test_the_history_shows_runs_with_pictures_newest_first(
    page: Page, two: tuple[str, str]
) -> None:
    go(page, "runs")
    page.until(lambda: set(two) <= set(listed(page)))
    assert listed(page).index(two[1]) < listed(page).index(two[0])
    picture = f".rv-card[data-id='{two[0]}'] img"
    page.until(lambda: page.js(f'return document.querySelector("{picture}").naturalWidth'))
    words = page.text(f".rv-card[data-id='{two[0]}']")
    assert "the same boat" in words and "done" in words and "cpu" in words and "2 steps" in words


def test_the_search_narrows_the_history_and_can_be_cleared(
    page: Page, two: tuple[str, str]
) -> None:
    go(page, "runs")
    page.until(lambda: listed(page))
    page.fill(".rv-q", "no such words")
    page.until(lambda: page.text(".rv-empty") == "No run matches these filters.")
    page.click(".rv-clear")
    page.until(lambda: set(two) <= set(listed(page)))
    page.js(
        "const s=document.querySelector('.rv-state');s.value='failed';"
        "s.dispatchEvent(new Event('input',{bubbles:true}))"
    )
    page.until(lambda: not set(two) & set(listed(page)))


def test_a_new_run_appears_without_asking(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    go(page, "runs")
    page.until(lambda: listed(page))
    id = enqueue(console, "just made", steps=2)
    state = "return document.querySelector(arguments[0])?.dataset.state"
    page.until(lambda: page.js(state, f".rv-card[data-id='{id}']") == "done")


def test_a_card_opens_the_run_with_player_facts_and_stages(
    page: Page, two: tuple[str, str]
) -> None:
    go(page, "runs")
    page.until(lambda: two[1] in listed(page))
    page.click(f".rv-card[data-id='{two[1]}'] a")
    page.until(lambda: page.js("return document.querySelector('.rv-one').dataset.run") == two[1])
    assert page.js("return location.hash") == f"#runs/{two[1]}"
    page.until(lambda: page.js("return document.querySelector('.rv-one video').readyState") == 4)
    page.until(lambda: "E2E" in page.text(".rv-times"))
    assert page.text(".rv-prompt") == "the same boat"
    assert "packed rows" in page.text(".rv-notes")
    assert "4 steps" in page.text(".rv-shape")
    page.shot("1440_light_run")
    page.js("location.hash='runs/nonsense'")
    page.until(lambda: page.text(".rv-alert") == "there is no run nonsense")
    assert page.text(".rv-one").strip() == "← All runs"
    page.click(".rv-one .rv-back")
    page.until(lambda: not page.js("return document.querySelector('.rv-list').hidden"))
    assert all("404" in error for error in page.errors())  # of the run that is not there


def test_a_run_is_deleted_only_after_a_second_click(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    id = done(console, "to be deleted", steps=2)
    with urllib.request.urlopen(f"{console.url}/api/v1/runs/{id}/thumb") as thumb:
        thumb.read()  # else a list may be asking for it while the run is deleted
    go(page, f"runs/{id}")
    page.until(lambda: page.all(".rv-delete"))
    page.click(".rv-delete")
    page.click(".rv-no")
    assert console.api(f"/runs/{id}")["state"] == "done"
    page.click(".rv-delete")
    assert page.js("return document.querySelector('.rv-ask').hidden") is False
    page.click(".rv-yes")
    page.until(lambda: page.js("return location.hash") == "#runs")
    page.until(lambda: two[0] in listed(page) and id not in listed(page))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        console.api(f"/runs/{id}")


def test_redo_queues_the_same_request_again(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    go(page, f"runs/{two[0]}")
    page.press(".rv-one .tools", "Redo")
    page.until(lambda: page.js("return location.hash") == "#generate")
    (again,) = [r for r in console.api("/runs?limit=5")["runs"] if r["parent"] == two[0]]
    assert ended(console, again["id"])["request"]["steps"] == 2


def test_a_run_is_loaded_into_the_form(page: Page, two: tuple[str, str]) -> None:
    go(page, f"runs/{two[0]}")
    page.press(".rv-one .tools", "Load into form")
    page.until(lambda: page.js("return location.hash") == "#generate")
    page.until(lambda: page.js("return h3.draft.get().prompt") == "the same boat")
    assert page.js("return h3.draft.get().steps") == "2"


def test_two_chosen_runs_are_compared(console: Server, page: Page, two: tuple[str, str]) -> None:
    go(page, "runs")
    page.until(lambda: set(two) <= set(listed(page)))
    for id in two:
        page.click(f".rv-card[data-id='{id}'] input")
    page.until(lambda: page.text(".rv-count") == "Two runs chosen")
    page.click(".rv-compare")
    pair = f"{two[0]}..{two[1]}"
    page.until(lambda: page.js("return document.querySelector('.rv-two').dataset.pair") == pair)
    rows = {row.text for row in page.all(".rv-differ tbody tr")}
    assert rows == {"steps 2 4"}
    assert "denoise" in page.text(".rv-delta tbody")
    page.until(lambda: len(page.all(".rv-parity tbody tr")) == 2)
    figures = console.api(f"/runs/compare?a={two[0]}&b={two[1]}")["latents"]["video"]
    assert f"{figures['psnr']:.1f} dB" in page.text(".rv-parity tbody tr")


def test_both_players_step_together_by_keys_and_buttons(page: Page, two: tuple[str, str]) -> None:
    compared(page, two)
    assert frames(page) == [0, 0]
    (body,) = page.all("body")
    body.send_keys("..")
    page.until(lambda: frames(page) == [2, 2])
    body.send_keys(",")
    page.until(lambda: frames(page) == [1, 1])
    page.click(".ab-next")
    page.until(lambda: frames(page) == [2, 2])
    page.until(lambda: page.text(".ab-frame") == "frame 3 of 22")
    page.js(
        "const s=document.querySelector('.ab-seek');s.value=21;s.dispatchEvent(new Event('input'))"
    )
    page.until(lambda: frames(page) == [21, 21])
    page.click(".ab-next")  # there is no further one
    assert frames(page) == [21, 21]


def test_both_players_play_in_step_and_loop(page: Page, two: tuple[str, str]) -> None:
    compared(page, two)
    page.click(".ab-sound [data-sound='']")
    page.js(
        f"{VIDEOS}window.drift=[];window.rounds=0;let last=0;const watch=()=>{{"
        "if(!v[0].paused&&!v[1].paused)window.drift.push(Math.abs(v[0].currentTime-v[1].currentTime));"
        "if(v[0].currentTime<last-0.3)window.rounds++;last=v[0].currentTime;"
        "requestAnimationFrame(watch)};watch()"
    )
    (body,) = page.all("body")
    body.send_keys(" ")
    page.until(lambda: page.js("return window.rounds") >= 2)
    assert page.text(".ab-play") == "Pause"
    body.send_keys(" ")
    page.until(lambda: page.js(f"{VIDEOS}return v.every(x=>x.paused)"))
    one, other = frames(page)
    assert one == other
    drift = sorted(page.js("return window.drift"))
    assert drift[len(drift) // 2] < 1 / 24


@pytest.mark.parametrize("side", [0, 1])
def test_a_player_that_reached_its_end_first_goes_on(
    page: Page, two: tuple[str, str], side: int
) -> None:
    compared(page, two)
    page.click(".ab-sound [data-sound='']")  # A leads
    page.click(".ab-play")
    page.until(lambda: page.js(f"{VIDEOS}return v.every(x=>!x.paused&&x.currentTime>0.05)"))
    # As the browser does where the last frame was shown late; the page mostly turns back before.
    ends = f"{VIDEOS}const one=v[arguments[0]];one.pause();one.dispatchEvent(new Event('ended'))"
    page.js(ends, side)
    page.until(lambda: page.js(f"{VIDEOS}return v.every(x=>!x.paused)"))
    page.js(f"{VIDEOS}window.from=v.map(x=>x.currentTime)")
    moved = f"{VIDEOS}return v.every((x,i)=>!x.paused&&x.currentTime!==window.from[i])"
    page.until(lambda: page.js(moved))
    assert page.text(".ab-play") == "Pause"


def test_the_sound_is_of_one_side_at_a_time(page: Page, two: tuple[str, str]) -> None:
    compared(page, two)
    muted = f"{VIDEOS}return v.map(x=>x.muted)"
    assert page.js(muted) == [False, True]
    page.click(".ab-sound [data-sound='b']")
    assert page.js(muted) == [True, False]
    page.click(".ab-sound [data-sound='']")
    assert page.js(muted) == [True, True]


def test_the_wipe_shows_more_of_one_side(page: Page, two: tuple[str, str]) -> None:
    compared(page, two)
    clip = "return getComputedStyle(document.querySelector('.ab-b')).clipPath"
    assert page.js(clip) == "inset(0px 0px 0px 50%)"
    (wipe,) = page.all(".ab-wipe")
    wipe.send_keys("\ue012" * 10)  # to the left, by keyboard
    assert page.js(clip) == "inset(0px 0px 0px 45%)"
    page.click(".ab-modes [data-mode='side']")
    boxes = page.js(
        "return [...document.querySelectorAll('.ab figure')].map(e=>e.getBoundingClientRect().x)"
    )
    assert boxes[0] < boxes[1]
    page.click(".ab-modes [data-mode='wipe']")


def test_a_run_without_a_video_is_said_in_the_comparison(
    console: Server, page: Page, two: tuple[str, str]
) -> None:
    id = enqueue(console, "stopped early", steps=500)
    page.until(lambda: console.api(f"/jobs/{id}")["state"] == "running")
    console.api(f"/jobs/{id}/cancel", "POST")
    assert ended(console, id)["state"] == "cancelled"
    go(page, f"runs/{two[0]}..{id}")
    page.until(lambda: page.text(".ab-none") == "B has no video.")
    page.until(lambda: "no latents were kept of" in page.text(".rv-parity"))


def test_what_a_user_writes_is_never_run_here(console: Server, page: Page) -> None:
    id = enqueue(console, ATTACK, steps=1)
    ended(console, id)
    go(page, "runs")
    page.until(lambda: id in listed(page))
    assert ATTACK in page.text(f".rv-card[data-id='{id}']")
    page.js("location.hash=arguments[0]", f"runs/{id}")
    page.until(lambda: page.text(".rv-prompt") == ATTACK)
    page.js("location.hash=arguments[0]", f"runs/{id}..{id}")
    page.until(lambda: ATTACK in page.text(".rv-names"))
    page.js("location.hash=arguments[0]", f"timing/{id}")
    page.until(lambda: page.js("return document.querySelector('.tm')?.dataset.run") == id)
    assert page.js("return window.hit") is None


def test_on_a_phone_the_times_need_no_scrolling(page: Page, two: tuple[str, str]) -> None:
    compared(page, two, width=390)
    heads = [head.text for head in page.all(".rv-delta thead th")]  # "" where it is hidden
    assert [text for text in heads if text] == ["A", "B", "%"]
    room = "const d=document.querySelector('.rv-delta .scroll');return d.scrollWidth-d.clientWidth"
    assert page.js(room) <= 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("view", ["list", "run", "compare"])
def test_runs_are_not_wider_than_the_window(
    page: Page, two: tuple[str, str], view: str, width: int, theme: str
) -> None:
    if view == "compare":
        compared(page, two, width=width, theme=theme)
        page.until(lambda: page.all(".rv-parity tbody tr"))
    else:
        go(page, "runs" if view == "list" else f"runs/{two[0]}", width=width, theme=theme)
        page.until(lambda: listed(page) if view == "list" else "E2E" in page.text(".rv-times"))
    page.shot(f"{width}_{theme}_runs_{view}")
    assert page.overflow() == []
