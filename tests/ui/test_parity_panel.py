"""The Parity panel in a real browser: a golden that is met, and a spoilt copy that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from tests.ui.conftest import ROOT, Page, Server
from tests.ui.made import ended

GOLDENS = ROOT / "tests" / "goldens"
IMG2IMG = "t2va_22f_img2img_denoise05"


def show(page: Page, id: str = "", **window: object) -> None:
    """Opens the panel, of a run if an id is given."""
    page.open(tab=f"parity/{id}" if id else "parity", **window)  # type: ignore[arg-type]
    page.until(lambda: len(page.all(".pa-goldens tbody tr")) >= 28)


def tick(page: Page, *cases: str) -> None:
    """Chooses exactly these cases of the list."""
    code = (
        "for(const b of document.querySelectorAll('.pa-goldens tbody input'))"
        "if(b.checked!==arguments[0].includes(b.getAttribute('aria-label')))b.click()"
    )
    page.js(code, [f"Choose {case}" for case in cases])


def rows(page: Page) -> dict[str, str]:
    """Golden id to status, of the cases of the run."""
    code = (
        "return Object.fromEntries([...document.querySelectorAll('.pa-cases tbody tr')]"
        ".map(r=>[r.dataset.golden,r.dataset.status]))"
    )
    return dict(page.js(code))


def finished(page: Page, seconds: float = 120.0) -> None:
    page.until(lambda: page.text(".pa-state") in ("done", "failed"), seconds)
    page.until(lambda: page.text(".pa-name") or page.text(".pa-reason"))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a golden whose step 3 and whose end are wrong."""
    file = safe_open(str(GOLDENS / f"{IMG2IMG}.safetensors"), framework="pt")
    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    for name in ("step_03/denoised_video", "final/video"):
        tensors[name] = tensors[name] * 1.2 + 0.3
    tensors["step_03/denoised_audio"].view(-1)[5] = float("nan")
    path = tmp_path_factory.mktemp("spoilt") / "spoilt_copy.safetensors"
    save_file(tensors, str(path), file.metadata())
    return path


@pytest.fixture(scope="module")
def run(console: Server, spoilt: Path) -> str:
    """The id of a parity run over a golden, a VAE golden with a join, and the spoilt copy."""
    folder = {"folder": str(spoilt.parent)}
    name = console.api("/parity/goldens/folder", "POST", folder)["collection"]
    goldens = [f"checkout/{IMG2IMG}", "checkout/vae_decode_tlat9_32x48", f"{name}/spoilt_copy"]
    made = console.api("/parity", "POST", {"goldens": goldens})["job"]["id"]
    job = ended(console, made, 300)
    assert job["state"] == "done", job
    return str(made)


def test_a_golden_is_chosen_run_and_met_in_the_browser(page: Page) -> None:
    show(page)
    assert page.all(".pa-go")[0].get_property("disabled")
    page.fill(".pa-seek", "schedules")
    page.until(lambda: len(page.all(".pa-goldens tbody tr")) == 1)
    assert "0.33.0" in page.text(".pa-goldens tbody")
    assert "0f1fa67a" in page.text(".pa-goldens tbody")
    assert "kitchen 0.2.31" in page.text(".pa-goldens tbody")
    tick(page, "schedules")
    assert page.text(".pa-go") == "Run 1 golden"
    page.click(".pa-go")
    page.until(lambda: "checkout/schedules" in rows(page), 120)  # an older run is shown till then
    finished(page)
    assert rows(page)["checkout/schedules"] in ("bit-equal", "pass")
    page.until(lambda: page.text(".pa-name") == "schedules")


def test_ltx_goldens_of_the_checkout_are_met_too(page: Page) -> None:
    show(page)
    page.fill(".pa-seek", "checkout+ltx/")
    page.until(lambda: len(page.all(".pa-goldens tbody tr")) == 10)
    page.shot("parity_1440_light_ltx")
    tick(page, "stage2_t2av")
    page.click(".pa-go")
    page.until(lambda: "checkout+ltx/stage2_t2av" in rows(page), 120)
    finished(page)
    assert rows(page)["checkout+ltx/stage2_t2av"] in ("bit-equal", "pass")
    page.shot("parity_1440_light_ltx_run")


def test_progress_is_shown_while_it_runs_and_a_reload_finds_it_again(page: Page) -> None:
    show(page)
    tick(page, IMG2IMG)
    page.click(".pa-go")
    page.until(lambda: page.text(".pa-state") == "runs")
    page.until(lambda: IMG2IMG in page.text(".pa-stage"))
    page.chrome.refresh()
    page.until(lambda: page.text(".pa-state") in ("runs", "done"))
    finished(page)
    assert rows(page)[f"checkout/{IMG2IMG}"] in ("bit-equal", "pass")


def test_cancel_ends_a_parity_run(page: Page) -> None:
    show(page)
    tick(page, IMG2IMG)
    page.click(".pa-go")
    page.until(lambda: page.text(".pa-state") == "runs")
    page.click(".pa-cancel")
    page.until(lambda: page.text(".pa-state") == "cancelled")


def test_a_spoilt_copy_fails_with_step_stage_and_gate(page: Page, run: str) -> None:
    show(page, run)
    finished(page)
    statuses = list(rows(page).values())
    assert statuses[-1] == "FAIL"
    assert statuses[0] in ("bit-equal", "pass")
    assert page.text(".pa-status") == "FAIL"  # the failing case is opened by itself
    free, staged = page.texts(".pa-divergence")
    for sentence in (free, staged):
        assert "step 4" in sentence  # counted from 1; the tensor is step_03
        assert "gate fp32 stage 1.0e-5" in sentence
    assert "denoised of the audio" in free and "non-finite values" in free
    assert "denoised of the video" in staged  # whose order is that of the computation
    assert "beyond" in page.text(".pa-steps tbody")
    assert "bit-equal" in page.text(".pa-steps tbody")


def test_curves_show_video_and_audio_apart_and_bit_equal_steps_as_such(
    page: Page, run: str
) -> None:
    show(page, run)
    finished(page)
    code = (
        "return [...document.querySelectorAll('.pa-plot')].map(d=>(d.data||[])"
        ".map(t=>({name:t.name,text:t.text||[],y:[...t.y]})))"
    )
    page.until(lambda: all(page.js(code)))
    video, audio = page.js(code)
    assert {"x", "denoised", "velocity", "gate"} <= {t["name"] for t in video}
    assert all(y > 0 for t in [*video, *audio] for y in t["y"])
    wrong = next(t for t in video if t["name"] == "denoised")["text"]
    assert wrong[0] == "bit-equal"
    assert "beyond the gate" in wrong[-1]
    heard, gate = (next(t for t in audio if t["name"] == name) for name in ("denoised", "gate"))
    assert (heard["text"][0], heard["text"][-1]) == ("bit-equal", "non-finite values")
    assert heard["y"][-1] > gate["y"][0] > heard["y"][0]  # not where bit-equal steps are
    page.press(".pa-metric", "PSNR")
    page.until(lambda: max(page.js(code)[0][0]["y"]) > 1)
    page.press(".pa-part", "Audio")
    page.press(".pa-which", "Staged")
    assert "non-finite values" in page.text(".pa-steps tbody")


def brightness(page: Page) -> int:
    """The brightest pixel of the difference picture."""
    code = (
        "const c=document.querySelector('.pa-heat');"
        "return Math.max(...c.getContext('2d').getImageData(0,0,c.width,c.height).data"
        ".filter((_,i)=>i%4<3))"
    )
    return int(page.js(code))


def test_the_heat_map_shows_the_difference_and_obeys_the_gain(page: Page, run: str) -> None:
    show(page, run)
    finished(page)
    page.until(lambda: page.js("return document.querySelector('.pa-heat').width") == 64)
    page.until(lambda: brightness(page) > 200)
    at = int(page.value(".pa-seekframe"))
    page.js(
        "const g=document.querySelector('.pa-gain input');g.value=3;"
        "g.dispatchEvent(new Event('input'))"
    )
    page.until(lambda: page.text(".pa-gain output") == "×8")
    page.press(".pa-controls", "One frame on" if at < 21 else "One frame back")
    page.until(lambda: int(page.value(".pa-seekframe")) != at)
    page.until(lambda: brightness(page) > 200)


def test_a_bit_equal_case_has_a_black_difference_and_its_joins_are_marked(
    page: Page, run: str
) -> None:
    show(page, run)
    finished(page)
    page.press(".pa-cases", "Show vae_decode_tlat9_32x48")
    page.until(lambda: page.text(".pa-name") == "vae_decode_tlat9_32x48")
    page.until(lambda: page.js("return document.querySelector('.pa-heat').width") == 48)
    assert len(page.all(".pa-bar-box[data-join='17']")) == 5
    page.press(".pa-controls", "Next join")
    page.until(lambda: "frame 18 of 30" in page.text(".pa-frame"))
    assert "in the join at 18" in page.text(".pa-frame")
    if rows(page)["checkout/vae_decode_tlat9_32x48"] == "bit-equal":
        page.until(lambda: brightness(page) <= 4)
        assert "no difference in any frame" in page.text(".pa-scale")


def test_an_upload_is_listed_and_deleted(page: Page, spoilt: Path, tmp_path: Path) -> None:
    show(page)
    page.click(".pa-more > summary")
    copy = tmp_path / "brought.safetensors"
    copy.write_bytes(spoilt.read_bytes())
    page.all(".pa-file")[0].send_keys(str(copy))
    page.press(".pa-upload", "Upload")
    page.until(lambda: page.texts(".pa-goldens tbody .pa-wide .pa-line")[:1] == ["brought"])
    page.press(".pa-collections li:first-child", "Delete the collection brought")
    page.press(".pa-collections li:first-child", "Really delete")
    page.until(lambda: "brought" not in page.text(".pa-collections"))
    assert "brought" not in page.text(".pa-goldens tbody")


def test_what_is_no_golden_is_refused_in_one_sentence(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "evil.safetensors"
    file.write_bytes(b"\x80\x02}q\x00.")
    show(page)
    page.click(".pa-more > summary")
    page.all(".pa-file")[0].send_keys(str(file))
    page.press(".pa-upload", "Upload")
    page.until(lambda: "is a Python pickle" in page.text(".pa-alert"))
    errors = [e for e in page.errors() if "400" not in e]  # the browser notes the refusal
    assert errors == []


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_panel_fits_the_window(page: Page, run: str, width: int, theme: str) -> None:
    show(page, run, width=width, theme=theme)
    finished(page)
    page.until(lambda: brightness(page) > 200)
    page.until(lambda: page.js("return document.querySelectorAll('.pa-plot .main-svg').length") > 1)
    assert page.overflow() == []
    page.shot(f"parity_{width}_{theme}_goldens")
    for part in (".pa-run", ".pa-case", ".pa-frames", ".pa-tables"):
        page.js("document.querySelector(arguments[0]).scrollIntoView()", part)
        page.shot(f"parity_{width}_{theme}_{part[4:]}")
