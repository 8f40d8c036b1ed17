"""Generate in a real browser over the real demo model: from references to a video that plays."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.ui.conftest import Page, Server

_VIDEO = "const v=document.querySelector('.run video');"


def _done(page: Page) -> int:
    return int(page.all(".bar")[0].get_attribute("aria-valuenow") or 0)


def test_two_pictures_and_a_sound_become_a_video_that_plays(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"], files["gull.png"], files["bell.wav"])
    page.fill("#steps", "40")
    page.until(lambda: page.text(".fit-rows").startswith("S = "))
    job = page.generate()
    page.until(lambda: page.state() == "running" and "denoise, step" in page.text(".run-phase"))
    page.until(lambda: 0 < _done(page) <= 40)
    preview = "const i=document.querySelector('.preview');return !i.hidden&&i.naturalWidth"
    page.until(lambda: page.js(preview))
    page.shot("generate_running_1440_light")
    page.ends(job)
    page.until(lambda: page.js(f"{_VIDEO}return v.readyState") == 4)
    assert page.js(f"{_VIDEO}return [v.videoWidth, v.videoHeight]") == [96, 64]
    page.js(f"{_VIDEO}v.muted=true;v.play()")
    page.until(lambda: page.js(f"{_VIDEO}return v.ended || v.currentTime > 0.2"))
    page.click(".times-box summary")
    names = page.until(lambda: set(page.texts(".times-box th")))
    assert {"text encode", "denoise", "per step", "mux", "E2E", "peak memory"} <= names
    assert any("packed rows" in note for note in page.texts(".notes li"))
    page.shot("generate_done_1440_light")


def test_the_demo_model_says_that_its_weights_are_random(page: Page) -> None:
    page.until(lambda: "Its weights are random" in page.text(".demo-banner"))


def test_a_reload_in_the_middle_of_a_run_finds_it_again(page: Page) -> None:
    page.fill("#steps", "400")
    page.generate()
    page.until(lambda: "denoise" in page.text(".run-phase"))
    page.chrome.refresh()
    page.ready()
    page.until(lambda: page.state() == "running")
    first = _done(page)
    page.until(lambda: _done(page) > first)
    page.press(".run-acts", "Cancel")
    page.until(lambda: page.state() == "cancelled")


def test_a_cancelled_run_leaves_no_black_box_and_can_be_retried(page: Page) -> None:
    page.fill("#steps", "1000")
    job = page.generate()
    page.until(lambda: page.state() == "running")
    page.press(".run-acts", "Cancel")
    page.ends(job, "cancelled")
    page.until(lambda: page.text(".chip-text").endswith("ready"))
    assert page.js("return document.querySelector('.screen').hidden")
    page.press(".run-acts", "Retry")
    page.until(lambda: page.state() == "running")


def test_a_double_click_queues_one_job(page: Page, console: Server) -> None:
    before = len(console.api("/jobs")["jobs"])
    page.js(
        "const b=document.querySelector('#go');b.click();b.click();setTimeout(()=>b.click(),150)"
    )
    page.until(lambda: len(console.api("/jobs")["jobs"]) > before and not page.queue())
    assert len(console.api("/jobs")["jobs"]) == before + 1


def test_ctrl_enter_in_the_prompt_generates(page: Page) -> None:
    before = page.js("return h3.jobs.all().length")
    (prompt,) = page.all("#prompt")
    prompt.send_keys("\ue009\ue007\ue000")
    page.until(lambda: page.js("return h3.jobs.all().length") == before + 1)


def test_redo_and_new_seed_are_jobs_of_their_own(page: Page, console: Server) -> None:
    page.fill("#seed", "18446744073709551615")
    page.ends(page.generate())
    first = console.api("/jobs?limit=1")["jobs"][0]
    assert first["seed"] == "18446744073709551615"
    page.ends(page.generate(".run-acts", "Redo"))
    again = console.api("/jobs?limit=1")["jobs"][0]
    assert (again["seed"], again["prompt"]) == (first["seed"], first["prompt"])
    page.ends(page.generate(".run-acts", "New seed"))
    assert console.api("/jobs?limit=1")["jobs"][0]["seed"] != first["seed"]


def test_a_finished_job_fills_the_form_again(page: Page, files: dict[str, Path]) -> None:
    page.upload(files["gull.png"])
    page.fill("#prompt", "a gull <Picture 1> above the harbour")
    page.fill("#steps", "3")
    page.ends(page.generate())
    page.click(".clear")
    page.fill("#steps", "9")
    assert not page.all(".ref")
    page.press(".run-acts", "Load into form")
    page.until(lambda: page.value("#steps") == "3")
    assert page.value("#prompt") == "a gull <Picture 1> above the harbour"
    assert page.texts(".ref-name") == ["gull.png"]


def test_one_of_our_mp4s_dropped_on_the_form_brings_its_settings_back(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"])
    page.fill("#prompt", "the boat <Picture 1> turns")
    page.fill("#steps", "5")
    page.fill("#seed", "77")
    page.ends(page.generate())
    page.forget()
    page.open()
    assert page.value("#seed") != "77"
    page.js(
        "(async()=>{const blob=await (await fetch(h3.jobs.ended()[0].video)).blob();"
        "const data=new DataTransfer();data.items.add(new File([blob],'harbour.mp4'));"
        "document.querySelector('.form').dispatchEvent(new DragEvent('drop',"
        "{dataTransfer:data,bubbles:true,cancelable:true}))})()"
    )
    page.until(lambda: "The settings of harbour.mp4 are in the form." in page.text(".dropped"))
    assert page.value("#prompt") == "the boat <Picture 1> turns"
    assert (page.value("#seed"), page.value("#steps")) == ("77", "5")
    assert page.texts(".ref-name") == ["boat.png"]
    page.press(".dropped", "Use it as a reference instead")
    page.until(lambda: page.texts(".ref-tag") == ["<Picture 1>", "<Video 1>"])


def test_the_draft_survives_a_reload(page: Page, files: dict[str, Path]) -> None:
    page.upload(files["boat.png"], files["bell.wav"])
    page.fill("#prompt", "a bell rings")
    page.fill("#steps", "7")
    page.fill("#width", "128")
    page.chrome.refresh()
    page.ready()
    page.until(lambda: page.texts(".ref-name") == ["boat.png", "bell.wav"])
    assert page.value("#prompt") == "a bell rings"
    assert (page.value("#steps"), page.value("#width")) == ("7", "128")


def test_references_are_numbered_by_kind_and_follow_their_order(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"], files["bell.wav"], files["gull.png"])
    assert page.texts(".ref-tag") == ["<Picture 1>", "<Audio 1>", "<Picture 2>"]
    page.click(".ref:nth-child(3) [data-act=up]")
    page.until(lambda: "gull" in page.text(".ref:nth-child(2)"))
    page.click(".ref:nth-child(1) [data-act=remove]")
    page.until(lambda: len(page.all(".ref")) == 2)
    assert page.texts(".ref-tag") == ["<Picture 1>", "<Audio 1>"]


def test_a_reference_is_dragged_to_another_place(page: Page, files: dict[str, Path]) -> None:
    page.upload(files["boat.png"], files["gull.png"], files["bell.wav"])
    page.js(
        "const rows=document.querySelectorAll('.ref'),data=new DataTransfer();"
        "const fire=(row,type)=>row.dispatchEvent(new DragEvent(type,"
        "{dataTransfer:data,bubbles:true,cancelable:true}));"
        "fire(rows[2],'dragstart');fire(rows[0],'dragover');fire(rows[0],'drop')"
    )
    page.until(lambda: page.texts(".ref-name") == ["bell.wav", "boat.png", "gull.png"])


def test_a_video_is_muted_or_takes_the_sound_of_another_file(
    page: Page, console: Server, files: dict[str, Path], tmp_path: Path
) -> None:
    job = page.generate()
    page.ends(job)
    video = tmp_path / "clip.mp4"
    video.write_bytes((console.folder / job / "result.mp4").read_bytes())
    page.all("input.pick")[0].send_keys(str(video))
    page.press(".dropped", "Use it as a reference instead")
    page.until(lambda: page.texts(".ref-tag") == ["<Video 1>"])
    page.press(".ref", "Leave its sound out")
    assert page.js("return h3.form().references[0].mute") is True
    page.press(".ref", "Replace its sound by a sound file")
    page.all("input.pick-sound")[0].send_keys(str(files["bell.wav"]))
    page.until(lambda: "with the sound of bell.wav" in page.text(".ref"))
    made = page.js("return h3.form().references[0]")
    assert made["soundtrack"] and made["mute"] is False
    page.until(lambda: "rows" in page.text(".ref-plan"))


def test_the_sound_of_a_video_is_numbered_before_the_sounds_as_the_model_counts(
    page: Page, console: Server, files: dict[str, Path], tmp_path: Path
) -> None:
    job = page.generate()
    page.ends(job)
    video = tmp_path / "clip.mp4"
    video.write_bytes((console.folder / job / "result.mp4").read_bytes())
    page.all("input.pick")[0].send_keys(str(video))
    page.press(".dropped", "Use it as a reference instead")
    page.until(lambda: page.texts(".ref-tag") == ["<Video 1>"])
    page.upload(files["bell.wav"])
    page.click(".ref:nth-child(2) [data-act=up]")
    page.until(lambda: page.texts(".ref-tag") == ["<Audio 2>", "<Video 1>"])
    assert page.texts(".ref-sound") == ["with its own sound: <Audio 1>"]
    assert page.texts(".tag") == ["<Audio 2>", "<Video 1>", "<Audio 1>"]
    asked = {"request": page.js("return h3.form()"), "plan": "cpu"}
    found = console.api("/preflight", "POST", asked)
    labels = [reference["label"] for reference in found["references"]]
    assert labels == [tag.strip("<>") for tag in page.texts(".ref-tag")]
    page.press(".ref:nth-child(2)", "Leave its sound out")
    page.until(lambda: page.texts(".ref-tag") == ["<Audio 1>", "<Video 1>"])
    assert page.texts(".ref-sound") == []


def test_what_will_be_done_to_a_reference_is_said_before_the_run(
    page: Page, files: dict[str, Path]
) -> None:
    page.upload(files["boat.png"])
    page.until(lambda: "encoded at 96×64" in page.text(".ref-plan"))
    assert "rows" in page.text(".ref-plan")


def test_a_tag_is_inserted_at_the_cursor(page: Page, files: dict[str, Path]) -> None:
    page.upload(files["boat.png"])
    page.js("const a=document.querySelector('#prompt');a.focus();a.setSelectionRange(1,1)")
    page.click(".tag")
    assert page.value("#prompt").startswith("A <Picture 1> small boat")


def test_frames_and_sizes_snap_and_the_page_says_so(page: Page) -> None:
    page.fill("#frames", "30")
    page.until(lambda: page.value("#frames") == "39")
    assert "30 became 39 frames = 1.63 s at 24 fps" in page.text("#snap")
    page.fill("#width", "100")
    page.until(lambda: page.value("#width") == "96")
    assert "width 100 became 96" in page.text("#snap")


def test_a_preset_fills_the_form(page: Page) -> None:
    page.choose(".preset", "reference_960x544_124f")
    page.until(lambda: page.value("#width") == "960")
    assert (page.value("#height"), page.value("#frames")) == ("544", "124")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("#steps", "0", "steps must be 1 to 1000, got 0"),
        ("#seed", "x", "seed must be a whole number from 0, got 'x'"),
        ("#seed", "9" * 20, f"seed must be at most 18446744073709551615, got '{'9' * 20}'"),
        ("#cfg", "", "CFG must be a number, got ''"),
    ],
)
def test_a_wrong_field_is_one_sentence_and_nothing_runs(
    page: Page, field: str, value: str, sentence: str
) -> None:
    page.js("document.querySelectorAll('details').forEach(d=>{d.open=true})")
    page.fill(field, value or "\ue003")  # nothing: the delete key empties the field
    page.click("#go")
    page.until(lambda: sentence in page.text("#part-go .alert"))
    assert page.queue() == []
    assert all("Failed to load resource" in error for error in page.errors())  # the 400 itself


def test_a_text_named_png_is_refused_by_name(page: Page, files: dict[str, Path]) -> None:
    page.all("input.pick")[0].send_keys(str(files["words.png"]))
    said = page.until(lambda: page.text(".load.bad"))
    assert "words.png" in said and "/tmp" not in said
    assert page.all(".ref") == []
    assert all("/api/v1/media" in error for error in page.errors())  # the 400 itself


def test_what_a_user_writes_is_never_run(page: Page, console: Server, tmp_path: Path) -> None:
    attack = "<img src=x onerror=window.hit=1>${window.hit=1}{{window.hit=1}}"
    evil = tmp_path / "<img src=x onerror='window.hit=1'>.png"
    Image.new("RGB", (64, 64)).save(evil)
    page.fill("#prompt", attack)
    page.upload(evil)
    page.fill("#seed", attack)
    page.click("#go")
    page.until(lambda: "seed must be a whole number" in page.text("#part-go .alert"))
    page.fill("#seed", "1")
    page.ends(page.generate())
    page.until(lambda: attack in page.text(".run-prompt"))
    page.until(lambda: attack in page.text(".jobs.ended .job-name"))
    assert page.js("return window.hit") is None
    assert page.all("img[src='x']") == []


def test_a_long_file_name_in_the_notes_wraps_on_a_phone(page: Page, tmp_path: Path) -> None:
    picture = tmp_path / f"{'x' * 72}.png"
    Image.new("RGB", (192, 128), (90, 90, 90)).save(picture)  # shrunk: a note names it
    page.open(width=390)
    page.upload(picture)
    page.ends(page.generate())
    page.until(lambda: picture.name in page.text(".notes"))
    page.until(
        lambda: page.js("return document.querySelector('.run').getBoundingClientRect().top") < 500
    )
    page.shot("generate_long_name_390_light")
    assert page.overflow() == []
