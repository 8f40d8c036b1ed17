"""The queue card in a real browser: order, edit, duplicate, pause, A/B, and a server that dies."""

from __future__ import annotations

from selenium import webdriver

from tests.ui.conftest import Page, Server


def _enqueue(server: Server, prompt: str, steps: int = 2) -> str:
    request = {"prompt": prompt, "width": 96, "height": 64, "frames": 22, "steps": steps}
    jobs = server.api("/jobs", "POST", {"request": request, "plans": ["cpu"]})["jobs"]
    return str(jobs[0]["id"])


def _order(server: Server) -> list[str]:
    return [job["prompt"] for job in server.api("/jobs?state=queued")["jobs"]]


def test_a_paused_queue_is_reordered_by_buttons_and_by_drag(page: Page, console: Server) -> None:
    page.press(".queue", "Pause")
    page.until(lambda: "The queue is paused" in page.text(".queue"))
    for prompt in ("first", "second", "third"):
        _enqueue(console, prompt)
    page.until(lambda: page.texts(".jobs.open .job-name") == ["first", "second", "third"])
    page.click(".jobs.open .job:nth-child(3) [data-act=up]")
    page.until(lambda: _order(console) == ["first", "third", "second"])
    page.until(lambda: page.texts(".jobs.open .job-name") == ["first", "third", "second"])
    page.js(
        "const rows=document.querySelectorAll('.jobs.open .job'),data=new DataTransfer();"
        "const fire=(row,type)=>row.dispatchEvent(new DragEvent(type,"
        "{dataTransfer:data,bubbles:true,cancelable:true}));"
        "fire(rows[2],'dragstart');fire(rows[0],'dragover');fire(rows[0],'drop')"
    )
    page.until(lambda: _order(console) == ["second", "first", "third"])
    page.shot("generate_queue_1440_light")
    page.press(".queue", "Resume")
    page.until(lambda: not page.queue())
    ended = console.api("/jobs?state=done&limit=3")["jobs"]
    ran = [job["prompt"] for job in sorted(ended, key=lambda job: job["started"])]
    assert ran == ["second", "first", "third"]


def test_a_waiting_job_is_edited_duplicated_and_taken_out(page: Page, console: Server) -> None:
    page.press(".queue", "Pause")
    job = _enqueue(console, "a slow river")
    page.until(lambda: page.queue() == [job])
    page.press(".jobs.open", "Edit in the form")
    page.until(lambda: page.text("#go") == "Save changes to job")
    assert page.value("#prompt") == "a slow river"
    page.fill("#prompt", "a fast river")
    page.click("#go")
    page.until(lambda: page.text("#go") == "Generate")
    assert _order(console) == ["a fast river"]
    page.press(".jobs.open", "Duplicate")
    page.until(lambda: len(page.queue()) == 2)
    assert _order(console) == ["a fast river", "a fast river"]
    page.press(".jobs.open", "Take out of the queue")
    page.until(lambda: len(page.queue()) == 1)
    assert job not in page.queue()


def test_one_request_is_queued_on_two_plans_together(page: Page, console: Server) -> None:
    (plan,) = (p for p in console.api("/plans")["plans"] if p["name"] == "cpu")
    fields = {key: value for key, value in plan["fields"].items() if key != "name"}
    console.api("/plans/cpu_again", "PUT", fields)
    page.open()
    page.choose("#plan-b", "cpu_again")
    page.fill("#prompt", "one seed, two plans")
    page.press("#part-go", "Generate both")
    page.until(lambda: len(page.queue()) == 2)
    page.until(lambda: not page.queue(), seconds=90)
    pair = console.api("/jobs?state=done&limit=2")["jobs"]
    assert {job["plan"] for job in pair} == {"cpu", "cpu_again"}
    assert len({job["group"] for job in pair} - {""}) == 1
    assert len({job["seed"] for job in pair}) == 1
    assert page.texts(".jobs.ended .job-ab")[:2] == ["A/B", "A/B"]


def test_a_server_that_is_killed_and_started_again_has_the_job_as_interrupted(
    page: Page, console: Server, chromium: webdriver.Chrome
) -> None:
    page.fill("#prompt", "it will be cut short")
    page.fill("#steps", "1000")
    page.generate()
    page.until(lambda: "denoise" in page.text(".run-phase"))
    console.kill()
    page.until(lambda: "The console does not answer" in page.text(".offline"))
    page.shot("offline_1440_light")
    console.start()
    page.until(lambda: page.js("return document.querySelector('.offline').hidden"))
    page.until(lambda: page.state() == "interrupted")
    assert page.text(".run-error")
    assert page.js("return document.querySelector('.screen').hidden")
    lost = page.errors()  # the browser notes every attempt to connect
    assert all(
        "ERR_CONNECTION" in line or "ERR_INCOMPLETE" in line or "ERR_EMPTY" in line for line in lost
    )
    page.press(".run-acts", "Retry")
    page.until(lambda: page.state() == "running")
    page.press(".run-acts", "Cancel")
    page.until(lambda: page.state() == "cancelled")
