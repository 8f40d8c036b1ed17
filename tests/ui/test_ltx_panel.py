"""The second family in a browser: its form, its licence, a video, its stages, its goldens."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.ui.conftest import ROOT, Page, Server
from tests.ui.made import done, ended

DIT = "random_tiny_ltx_dit_nvfp4.safetensors"
SMALL = {"family": "ltx", "prompt": "a buoy", "width": 128, "height": 64, "frames": 9, "fps": 12}
PLANS = ("ltx-tiny", "ltx-licensed", "ltx-missing")


@pytest.fixture(scope="module")
def ltx(console: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans of LTX: the tiny demo, the same under a licence, one whose files are not there."""
    folder = tmp_path_factory.mktemp("ltx_demo")
    command = ["make-demo", "--family", "ltx", "--size", "tiny", "--out", str(folder)]
    subprocess.run([sys.executable, "launch.py", *command], cwd=ROOT, check=True)
    with safe_open(str(folder / DIT), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() | {"license": "LTX-2.x Community License Agreement"}
    save_file(tensors, str(folder / "licensed.safetensors"), metadata)
    parts = {"video_vae": "vae", "upsampler": "latent_upsampler"}
    parts |= {name: name for name in ("text_encoder", "audio_vae", "vocoder")}
    files = {name: str(folder / place) for name, place in parts.items()}
    for name, dit in zip(PLANS, (DIT, "licensed.safetensors", "gone.safetensors"), strict=True):
        body: dict[str, Any] = {"family": "ltx", "device": "cpu", "dtype": "fp32", "threads": 1}
        body |= {"video_vae_dtype": "fp32", "text_encoder": "resident"}
        console.api(f"/plans/{name}", "PUT", body | {"models": files | {"dit": str(folder / dit)}})
    yield
    for name in PLANS:
        console.api(f"/plans/{name}", "DELETE")


@pytest.fixture(scope="module")
def run(console: Server, ltx: None) -> str:
    """The id of a done run of LTX."""
    made = console.api("/jobs", "POST", {"request": SMALL, "plans": ["ltx-tiny"]})
    job = ended(console, made["jobs"][0]["id"])
    assert job["state"] == "done", job
    return str(job["id"])


def choose(page: Page, plan: str) -> None:
    """Takes a plan in the form and waits for what the planner says of it."""
    page.choose("#plan", plan)
    page.until(lambda: family(page) == "ltx")
    page.until(lambda: "tokens" in page.text(".fit-rows"))


def family(page: Page) -> str:
    return str(page.js("return document.querySelector('.form').dataset.family"))


def seen(page: Page, css: str) -> bool:
    return bool(page.js("return !!document.querySelector(arguments[0]).offsetParent", css))


def test_the_family_and_the_plan_follow_each_other(page: Page, ltx: None) -> None:
    before = page.js("return h3.form()")
    assert (family(page), seen(page, "#steps"), seen(page, "#ltx-frames")) == ("h3", True, False)
    choose(page, "ltx-tiny")
    assert page.texts(".families [aria-pressed=true]") == ["LTX-2.5"]
    for css in ("#part-references", "#steps", "#sampler", "#cfg"):
        assert not seen(page, css), css
    assert "8 + 3 steps, two stages" in page.text("#part-ltx")
    page.press(".families", "MiniMax H3")
    page.until(lambda: page.value("#plan") == "cpu")
    assert page.js("return h3.form()") == before and seen(page, "#steps")
    page.press(".families", "LTX-2.5")
    page.until(lambda: page.value("#plan") == "ltx-tiny")
    others = page.js("return [...document.querySelectorAll('#plan-b option')].map(o=>o.value)")
    assert "ltx-licensed" in others and "cpu" not in others
    page.chrome.refresh()
    page.ready()
    page.until(lambda: family(page) == "ltx" and page.value("#plan") == "ltx-tiny")


def test_sizes_and_frames_snap_to_its_grid_and_the_page_says_so(page: Page, ltx: None) -> None:
    choose(page, "ltx-tiny")
    page.fill("#ltx-frames", "50")
    page.until(lambda: page.value("#ltx-frames") == "57")
    assert "50 became 57 frames = 2.38 s at 24 fps" in page.text("#part-ltx .snap")
    page.fill("#ltx-fps", "30")
    page.until(lambda: "57 frames = 1.90 s at 30 fps" in page.text("#part-ltx .snap"))
    page.fill("#ltx-width", "1000")
    page.until(lambda: "width 1000 became 1024" in page.text("#part-ltx .snap"))
    asked = page.js("return h3.form()")
    prompt = page.value("#prompt")
    sizes = {"width": 1024, "height": 128, "frames": 57, "fps": 30}
    assert asked == {"family": "ltx", "prompt": prompt, "seed": page.value("#ltx-seed"), **sizes}


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("#ltx-fps", "99", "fps must be 8 to 60, got 99"),
        ("#ltx-frames", "\ue003", "frames must be a whole number, got ''"),
        ("#ltx-seed", "x", "seed must be a whole number from 0, got 'x'"),
        ("#ltx-seed", "18446744073709551615", "seed must be 0 to 2^64-10001 for LTX"),
    ],
)
def test_a_wrong_field_is_one_sentence_and_nothing_runs(
    page: Page, ltx: None, field: str, value: str, sentence: str
) -> None:
    choose(page, "ltx-tiny")
    page.fill(field, value)
    page.click("#go")
    page.until(lambda: sentence in page.text("#part-go .alert"))
    assert page.queue() == []
    assert all("Failed to load resource" in error for error in page.errors())  # the 400 itself


def test_the_first_frame_is_one_picture(page: Page, ltx: None, files: dict[str, Path]) -> None:
    choose(page, "ltx-tiny")
    (pick,) = page.all("input.pick-frame")
    pick.send_keys(str(files["bell.wav"]))
    page.until(lambda: "LTX takes one picture" in page.text("#part-ltx .load.bad"))
    pick.send_keys(str(files["boat.png"]))
    page.until(lambda: page.texts(".frame .ref-name") == ["boat.png"])
    page.until(lambda: "stage 2" in page.text(".frame .ref-plan"))
    page.until(lambda: page.js("return document.querySelector('.frame img').naturalWidth"))
    assert page.text(".add-frame") == "Replace" and page.js("return !!h3.form().image")
    page.press(".frame", "Remove boat.png")
    page.until(lambda: not page.all(".frame .ref"))
    assert page.js("return 'image' in h3.form()") is False


def test_a_missing_demo_says_how_to_make_it(page: Page, ltx: None) -> None:
    choose(page, "ltx-missing")
    told = page.until(lambda: page.text(".fit-stop"))
    assert "gone.safetensors is not there" in told
    assert "launch.py make-demo --family ltx --size tiny --out models/ltx_demo" in told


@pytest.mark.parametrize("width", [1440, 390])
def test_a_prompt_and_a_picture_become_a_video_with_sound(
    page: Page, ltx: None, files: dict[str, Path], width: int
) -> None:
    page.open(width=width)
    choose(page, "ltx-tiny")
    page.all("input.pick-frame")[0].send_keys(str(files["boat.png"]))
    page.until(lambda: page.texts(".frame .ref-name") == ["boat.png"])
    for name, value in (("width", 256), ("height", 256), ("frames", 25)):
        page.fill(f"#ltx-{name}", str(value))
    page.shot(f"ltx_form_{width}_light")
    assert page.overflow() == []
    page.js(
        "window.told=[];h3.on('job',(j)=>{if(j.stage==='denoise'||j.stage==='latent upsample')"
        "window.told.push(j.stage+', '+h3.family.progress(j))})"
    )
    page.ends(page.generate())
    video = "const v=document.querySelector('.run video');"
    page.until(lambda: page.js(f"{video}return v.readyState") == 4)
    assert page.js(f"{video}return [v.videoWidth, v.videoHeight]") == [256, 256]
    page.js(f"{video}v.muted=true;v.play()")
    page.until(lambda: page.js(f"{video}return v.webkitAudioDecodedByteCount") > 0)
    page.until(lambda: page.text(".provenance"))
    assert "AI-generated" in page.text(".provenance")
    assert "random weights · v2a_source pre_a2v" in page.text(".provenance")
    assert "25 frames at 24 fps · 8 + 3 steps · seed" in page.text(".run-facts")
    told = "\n".join(page.js("return window.told"))  # a page is not told of every step
    stage_1 = r"denoise, stage 1 at 128×128, step [0-8] of 8"
    stage_2 = r"denoise, stage 2 at 256×256, step [0-3] of 3"
    for line in told.splitlines():
        assert re.fullmatch(rf"{stage_1}|{stage_2}|latent upsample, [01] of 1", line), told
    assert told
    page.shot(f"ltx_done_{width}_light")
    assert page.overflow() == []
    page.press(".families", "MiniMax H3")
    page.press(".run-acts", "Load into form")
    page.until(lambda: family(page) == "ltx" and page.texts(".frame .ref-name") == ["boat.png"])


def test_a_licence_is_acknowledged_before_its_weights_run(
    page: Page, console: Server, ltx: None
) -> None:
    console.api("/jobs/queue", "POST", {"paused": True})
    choose(page, "ltx-licensed")
    page.until(lambda: "is to be acknowledged" in page.text(".licence-note"))
    page.press("#part-go", "Generate")
    page.until(lambda: page.all("dialog[open]"))
    shown = page.text("dialog")
    for words in ("LTX-2.x Community License", "11 August 2026", "USD 10 million"):
        assert words in shown
    assert "licensed.safetensors" in shown and "came with the weights" in shown
    assert page.all(".lic-yes")[0].get_property("disabled")
    page.shot("ltx_licence_1440_light")
    page.press("dialog", "Not now")
    page.until(lambda: "Nothing was queued" in page.text("#part-go .alert"))
    assert page.queue() == []
    page.press("#part-go", "Generate")
    page.until(lambda: page.all("dialog[open]"))
    page.click(".lic-read")
    page.press("dialog", "Acknowledge")
    page.until(lambda: len(page.queue()) == 1 and not page.all("dialog"))
    page.until(lambda: "is acknowledged for licensed.safetensors" in page.text(".licence-line"))
    (kept,) = console.api("/licences")["licences"][0]["acknowledgements"]
    assert kept["file"] == "licensed.safetensors"
    (console.folder / "licences.json").unlink()  # what the page knows is old from here on
    page.press("#part-go", "Generate")
    page.until(lambda: page.all("dialog[open]"))
    page.press("dialog", "Not now")
    page.until(lambda: "Nothing was queued" in page.text("#part-go .alert"))
    assert len(page.queue()) == 1
    assert all("428" in error for error in page.errors())


def test_an_ltx_plan_has_its_own_fields_and_closed_backends(page: Page, ltx: None) -> None:
    page.js("h3.go('layout')")
    page.until(lambda: "probed" in page.text(".ly-when") and page.all(".ly-backend"), 120)
    page.choose(".ly-base", "ltx-tiny")
    page.until(lambda: "LTX-2.5" in page.text(".ly-family"))
    there = set(
        page.js("return [...document.querySelectorAll('[data-plan]')].map(e=>e.dataset.plan)")
    )
    assert {"v2a_source", "ltx_rope_seconds", "ltx_tables", "ltx_nvfp4_order"} <= there
    assert not there & {"cache", "adaln", "elementwise", "memory"}
    option = "return document.querySelector(\"[data-plan='attention'] option[value='%s']\").%s"
    assert page.js(option % ("kj", "disabled")) and not page.js(option % ("sage2", "disabled"))
    assert "closed for LTX" in page.js(option % ("kj", "text"))
    card = "[data-name='kj'] .ly-ltx"
    assert page.text(card).split("\n") == ["LTX-2.5", "closed", "not validated on LTX yet"]
    assert "open" in page.text("[data-name='sdpa'] .ly-ltx")
    page.choose(".ly-base", "cpu")
    page.until(lambda: "MiniMax H3" in page.text(".ly-family"))
    assert not page.all("[data-plan='v2a_source']") and page.all("[data-plan='cache']")


def test_timing_shows_both_stages_and_runs_says_the_family(page: Page, run: str) -> None:
    page.open(tab=f"timing/{run}")
    page.until(lambda: page.all(".tm-steps .main-svg"))
    words = page.texts(".tm-shape li")
    assert {"LTX-2.5", "9 frames at 12 fps", "8 + 3 steps"} <= set(words)
    plotted = page.js(
        "return [...document.querySelectorAll('.tm-steps text, .tm-fall text')]"
        ".map(e=>e.textContent.trim())"
    )
    assert {"stage 1", "stage 2", "latent upsample"} <= set(plotted)
    page.open(tab=f"runs/{run}")
    page.until(lambda: "AI-generated · LTX-2.5" in page.text(".rv-facts"))
    assert page.overflow() == []


def test_two_families_are_not_compared(page: Page, console: Server, run: str) -> None:
    other = done(console, "a boat of H3")
    page.open(tab=f"runs/{run}..{other}")
    page.until(lambda: "two model families have nothing to compare" in page.text(".rv-alert"))
    assert not seen(page, ".ab")
    console.api("/runs/baseline", "PUT", {"id": run})
    page.open(tab=f"timing/{other}")
    page.until(lambda: "is a run of another model family" in page.text(".tm-base"))
    console.api("/runs/baseline", "DELETE")


def test_a_golden_of_ltx_is_run_and_met_in_the_browser(
    page: Page, console: Server, ltx_goldens: Path
) -> None:
    name = console.api("/parity/goldens/folder", "POST", {"folder": str(ltx_goldens)})["collection"]
    page.open(tab="parity")
    page.fill(".pa-seek", f"{name}/stage2")
    page.until(lambda: len(page.all(".pa-goldens tbody tr")) == 1)
    assert "LTX stages" in page.text(".pa-goldens tbody")
    page.click(".pa-goldens tbody input")
    page.press(".pa-start", "Run 1 golden")
    page.until(lambda: page.text(".pa-state") in ("done", "failed"), 120)
    page.until(lambda: page.text(".pa-status") in ("pass", "bit-equal"))
    forms = page.texts(".pa-form button")
    assert forms == ["model_pre_a2v", "comfy_post_a2v", "comfy_pre_a2v"]
    rows = "return [...document.querySelectorAll('.pa-steps tbody th')].map(e=>e.innerText)"
    each = ["x", "velocity", "denoised"]
    assert page.js(rows) == [f"{step} · {what}" for step in (1, 2, 3) for what in each]
    page.press(".pa-form", "comfy_pre_a2v")
    page.until(lambda: len(page.js(rows)) == 6)
    console.api(f"/parity/goldens/{name}", "DELETE")


def test_a_step_is_told_by_its_stage(page: Page) -> None:
    page.open()
    job = "{stage:'denoise',total:11,request:{family:'ltx'},family:'ltx',done:%d,detail:'%s'}"

    def told(done: int, detail: str) -> object:
        return page.js(f"return h3.family.progress({job % (done, detail)})")

    assert told(3, "stage 1, 384x256") == "stage 1 at 384×256, step 3 of 8"
    assert told(8, "stage 1, 384x256") == "stage 1 at 384×256, step 8 of 8"
    assert told(8, "stage 2, 768x512") == "stage 2 at 768×512, step 0 of 3"
    assert told(11, "stage 2, 768x512") == "stage 2 at 768×512, step 3 of 3"
