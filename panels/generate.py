"""The Generate panel: a form on the left, the run on the right; callbacks read snapshots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from app import presets, runs
from app.session import Session
from panels import views, widgets
from panels.views import Upload
from runtime.messages import REF_IMAGE_SIZES, SAMPLERS, SCHEDULERS, Ref2VARequest

TITLE = "Generate"
TICK_SECONDS = 0.5
SIZES = ("96x64", "480x288", "864x480", "960x544", "1056x608", "1344x768")
_QUIET: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}
_LICENCE = (
    "The H3 checkpoints have their own licence, with limits on territory; read it before you use "
    "or publish what they make."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The inputs of the form; `fields` is their order in every callback."""

    prompt: gr.Textbox
    size: gr.Dropdown
    frames: gr.Number
    steps: gr.Number
    seed: gr.Textbox
    sampler: gr.Dropdown
    scheduler: gr.Dropdown
    cfg: gr.Number
    negative_prompt: gr.Textbox
    shift_video: gr.Number
    shift_audio: gr.Number
    ref_image_size: gr.Dropdown

    @property
    def fields(self) -> list[gr.components.Component]:
        """The components in order."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def build(session: Session, chip: gr.HTML) -> None:
    """Draws the panel into the open Blocks; `chip` is the header's engine state."""
    first = _first_request(session)
    uploads = gr.State(())
    with gr.Row(elem_classes="cols"):
        with gr.Column(scale=5, min_width=340, elem_classes="h3card"):
            preset = gr.Dropdown(
                list(presets.names("requests")), value=_preset(session), label="Preset"
            )
            prompt = gr.Textbox(first.prompt, label="Prompt", lines=4, elem_id="prompt")
            gr.HTML("<div class='label'>References</div>")
            strip = widgets.strip()
            add = gr.UploadButton(
                "Add pictures, videos, sounds",
                file_count="multiple",
                file_types=["image", "video", "audio"],
                size="md",
                elem_id="add",
            )
            form, snap_line, dice = _numbers(first, prompt)
            alert = widgets.alert()
            with gr.Row():
                go = gr.Button("Generate", variant="primary", elem_id="go", elem_classes="go")
                stop = gr.Button("Cancel", elem_id="stop", interactive=False)
        with gr.Column(scale=6, min_width=340, elem_classes="h3card"):
            result = widgets.run(views.run(session.snapshot()))
    gr.HTML(f"<p class='licence'>{_LICENCE}</p>")

    preset.change(_fill, [preset, prompt], form.fields, **_QUIET)
    form.frames.change(_snap_line, form.frames, snap_line, **_QUIET)
    form.frames.blur(_snap, form.frames, form.frames, **_QUIET)
    dice.click(_new_seed, None, form.seed, **_QUIET)
    add.upload(_add, [add, uploads], [uploads, strip, alert], **_QUIET)
    strip.apply(_arrange, uploads, [uploads, strip], **_QUIET)

    def generate(items: tuple[Upload, ...], *values: Any) -> tuple[dict[str, Any], Any]:
        try:
            request = _request(items, values)
            session.submit(request)
        except ValueError as error:
            return {"text": str(error)}, gr.skip()
        return {"text": ""}, request.frames

    def cancel() -> None:
        job = session.snapshot().latest
        if job is not None:
            session.cancel(job.request.id)

    def tick(seen: int) -> Any:
        now = session.snapshot()
        if now.version == seen:
            return gr.skip()
        job = now.latest
        busy = job is not None and not job.ended
        return (
            now.version,
            views.run(now),
            views.chip(now, session.plan),
            gr.update(interactive=busy),
        )

    go.click(generate, [uploads, *form.fields], [alert, form.frames], **_QUIET)
    stop.click(cancel, None, None, **_QUIET)
    seen = gr.State(-1)
    gr.Timer(TICK_SECONDS).tick(tick, seen, [seen, result, chip, stop], **_QUIET)


def _numbers(first: Ref2VARequest, prompt: gr.Textbox) -> tuple[Form, gr.HTML, gr.Button]:
    with gr.Row():
        size = gr.Dropdown(
            list(SIZES),
            value=f"{first.width}x{first.height}",
            label="Size",
            allow_custom_value=True,
            min_width=130,
            elem_id="size",
        )
        frames = gr.Number(
            first.frames, label="Frames", precision=0, min_width=90, elem_id="frames"
        )
        steps = gr.Number(first.steps, label="Steps", precision=0, min_width=80, elem_id="steps")
    snap_line = gr.HTML(
        {"text": views.snap(first.frames)[1]},
        html_template="<div class='snap' aria-live='polite'></div>",
        js_on_load="const d=element.querySelector('.snap');"
        "function draw(){d.textContent=(props.value&&props.value.text)||'';}"
        "watch('value',draw);draw();",
        elem_id="snap",
    )
    with gr.Row(equal_height=False, elem_classes="seed-row"):
        seed = gr.Textbox(str(first.seed), label="Seed", min_width=150, elem_id="seed", scale=3)
        dice = gr.Button("New seed", size="md", min_width=90, scale=1, elem_classes="dice")
    with gr.Accordion("Sampling", open=False):
        with gr.Row():
            sampler = gr.Dropdown(
                list(SAMPLERS), value=first.sampler, label="Sampler", min_width=130
            )
            scheduler = gr.Dropdown(
                list(SCHEDULERS), value=first.scheduler, label="Scheduler", min_width=130
            )
        with gr.Row():
            cfg = gr.Number(first.cfg, label="CFG", min_width=80)
            shift_video = gr.Number(first.shift_video, label="Video shift", min_width=80)
            shift_audio = gr.Number(first.shift_audio, label="Audio shift", min_width=80)
        ref_size = gr.Dropdown(
            list(REF_IMAGE_SIZES), value=first.ref_image_size, label="Reference picture size"
        )
        negative = gr.Textbox(
            first.negative_prompt, label="Negative prompt (used when CFG is not 1)", lines=2
        )
    form = Form(
        prompt=prompt,
        size=size,
        frames=frames,
        steps=steps,
        seed=seed,
        sampler=sampler,
        scheduler=scheduler,
        cfg=cfg,
        negative_prompt=negative,
        shift_video=shift_video,
        shift_audio=shift_audio,
        ref_image_size=ref_size,
    )
    return form, snap_line, dice


def _first_request(session: Session) -> Ref2VARequest:
    return presets.load_request(presets.find("requests", _preset(session)), id="form")


def _preset(session: Session) -> str:
    return "demo" if presets.is_demo(session.plan) else "reference_960x544_124f"


def _request(uploads: tuple[Upload, ...], values: tuple[Any, ...]) -> Ref2VARequest:
    """The form as a request; ValueError with one sentence for what cannot be."""
    form = dict(zip(Form.__dataclass_fields__, values, strict=True))
    width, height = views.size(form["size"])
    return Ref2VARequest(
        id=runs.new_id(),
        prompt=form["prompt"] or "",
        references=tuple(item.reference() for item in uploads),
        width=width,
        height=height,
        frames=views.snap(form["frames"])[0],
        steps=views.whole(form["steps"], "steps"),
        seed=views.whole(form["seed"], "seed"),
        sampler=form["sampler"],
        scheduler=form["scheduler"],
        cfg=_number(form["cfg"], "CFG"),
        negative_prompt=form["negative_prompt"] or "",
        shift_video=_number(form["shift_video"], "video shift"),
        shift_audio=_number(form["shift_audio"], "audio shift"),
        ref_image_size=form["ref_image_size"],
    )


def _number(value: Any, what: str) -> float:
    if value is None:
        raise ValueError(f"{what} must be a number; fill it in")
    return float(value)


def _fill(name: str | None, prompt: str) -> list[Any]:
    if name is None:
        return [gr.skip()] * len(Form.__dataclass_fields__)
    request = presets.load_request(presets.find("requests", name), id="form")
    values = {
        "prompt": request.prompt or prompt,
        "size": f"{request.width}x{request.height}",
        "seed": str(request.seed),
    }
    return [
        values[field] if field in values else getattr(request, field)
        for field in Form.__dataclass_fields__
    ]


def _snap_line(frames: Any) -> dict[str, str]:
    try:
        return {"text": views.snap(frames)[1]}
    except ValueError as error:
        return {"text": str(error)}


def _snap(frames: Any) -> Any:
    try:
        return views.snap(frames)[0]
    except ValueError:
        return gr.skip()  # the line under the field says what is wrong


def _new_seed() -> str:
    return str(random.SystemRandom().randrange(2**32))


def _add(
    paths: list[str], uploads: tuple[Upload, ...]
) -> tuple[tuple[Upload, ...], dict[str, Any], dict[str, str]]:
    wrong = ""
    for path in paths:
        try:
            uploads = (*uploads, views.upload(_uploaded(path)))
        except ValueError as error:
            # The cache folder's name says nothing to a person: the file's own name does.
            wrong = wrong or str(error).replace(path, Path(path).name)
    return uploads, views.strip(uploads), {"text": wrong}


def _uploaded(path: str) -> Path:
    """Only what was uploaded here; a page may not name other files of this machine."""
    file = Path(path).resolve()
    if not file.is_relative_to(Path(get_upload_folder()).resolve()):
        raise ValueError(f"{file.name} was not uploaded in this page; add it again")
    return file


def _arrange(uploads: tuple[Upload, ...], event: gr.EventData) -> Any:
    act, index = event._data.get("act"), event._data.get("index")
    if not isinstance(act, str) or not isinstance(index, int):
        return gr.skip()
    changed = views.arrange(uploads, act, index)
    return changed, views.strip(changed)
