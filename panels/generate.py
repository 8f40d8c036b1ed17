"""The Generate panel: the request on the left; its run and the queue on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gradio as gr

from app import presets
from panels import ltx, queue, references, result
from panels.first import request_json
from panels.widgets import field, part
from runtime.messages import FPS, REF_IMAGE_SIZES, SAMPLERS, SCHEDULERS, SIZE_MULTIPLE

if TYPE_CHECKING:
    from app.console import Console

TITLE = "Generate"
SIZES = ("480×288", "864×480", "960×544", "1056×608", "1344×768", "544×960", "768×768", "96×64")

_PROMPT = (
    "<div class='banner demo-banner' role='note' hidden><strong>Demo model.</strong> Its weights "
    "are random, so it makes coloured noise whatever the prompt says. It shows that the whole path "
    "works; for real videos choose a plan that names published checkpoints.</div>"
    "<div class='note dropped' role='status' hidden><span class='dropped-text'></span>"
    "<button class='quiet as-reference' type='button'>Use it as a reference instead</button></div>"
    "<div class='note editing' role='status' hidden></div>"
    "<div class='fields'>"
    "<div class='f families-field'><span id='family-label'>Model</span>"
    "<div class='switch families' role='group' aria-labelledby='family-label'></div></div>"
    + field("Preset", "<select class='preset'></select>", "grow")
    + "<button class='quiet clear' type='button'>Clear</button></div>"
    + field(
        "Prompt",
        "<textarea id='prompt' data-field='prompt' rows='4' maxlength='20000' "
        "placeholder='What happens, how it looks, how it sounds'></textarea>",
    )
    + "<div class='tagbar' aria-label='Insert a reference into the prompt'></div>"
    "<div class='tag-note' role='status'></div>"
)
_NUMBER = (
    "<input id='{0}' data-field='{0}' inputmode='decimal' autocomplete='off' spellcheck='false'>"
)
_WHOLE = (
    "<input id='{0}' data-field='{0}' type='number' min='{1}' max='{2}' step='{3}' "
    "inputmode='numeric' autocomplete='off'>"
)
_NUMBERS = (
    "<div class='fields'>"
    + field("Size", "<select class='size'></select>", "grow")
    + field("Width", _WHOLE.format("width", 32, 4096, SIZE_MULTIPLE))
    + "<button class='sign turn' type='button' title='Swap width and height' "
    "aria-label='Swap width and height'></button>"
    + field("Height", _WHOLE.format("height", 32, 4096, SIZE_MULTIPLE))
    + "</div><div class='fields'>"
    + field("Frames", _WHOLE.format("frames", 5, 3592, 17))
    + field("Steps", _WHOLE.format("steps", 1, 1000, 1))
    + field("Seed", _NUMBER.format("seed"), "grow")
    + "<button class='sign dice' type='button' title='New seed' aria-label='New seed'></button>"
    "</div><div class='snap' id='snap' aria-live='polite'></div>"
    "<details class='more'><summary>Sampling</summary><div class='fields'>"
    + field("Sampler", "<select id='sampler' data-field='sampler'></select>", "grow")
    + field("Schedule", "<select id='scheduler' data-field='scheduler'></select>", "grow")
    + field("Reference pictures", "<select data-field='ref_image_size'></select>", "grow")
    + "</div><div class='fields'>"
    + field("CFG", _NUMBER.format("cfg"))
    + field("Video shift", _NUMBER.format("shift_video"))
    + field("Audio shift", _NUMBER.format("shift_audio"))
    + "</div>"
    + field(
        "Negative prompt, used when CFG is not 1",
        "<textarea data-field='negative_prompt' id='negative' rows='2'></textarea>",
    )
    + "<label class='check'><input type='checkbox' data-field='negative_references'> "
    "The negative side sees the references too</label></details>"
)
_FIT = (
    "<div class='fields'>"
    + field("Plan", "<select id='plan' data-field='plan'></select>", "grow")
    + field("Compare with", "<select id='plan-b' data-field='plan_b'></select>", "grow")
    + "</div><p class='note plan-gone' role='status' hidden></p>"
    "<label class='check'><input type='checkbox' data-field='keep_latents'> "
    "Keep the latents (for parity and comparison)</label>"
    "<section class='fit' aria-label='Before it runs' aria-live='polite'></section>"
)
_GO = (
    "<div class='alert' role='alert' hidden></div>"
    "<label class='check force' hidden><input type='checkbox' id='force'> "
    "Queue it all the same</label>"
    "<div class='goes'><span class='pill verdict' hidden></span>"
    "<button id='go' class='primary' type='button' disabled>Generate</button>"
    "<button class='quiet leave' type='button' hidden "
    "title='Leave the job as it was'>Discard</button>"
    "<span class='hint'>Ctrl + Enter</span></div>"
)


def build(console: Console, chip: gr.HTML) -> None:
    """Draws the panel into the open Blocks; `chip` is the header."""
    with gr.Row(elem_classes="cols"):
        with gr.Column(scale=11, min_width=320, elem_classes="h3card form"):
            part("prompt", _PROMPT, {"presets": _requests()})
            references.build()
            part("numbers", _NUMBERS, _choices(), scripts=("snap",))
            ltx.build()
            part("fit", _FIT)
            part("go", _GO)
        with gr.Column(scale=12, min_width=320, elem_classes="side"):
            result.build()
            queue.build()


def _choices() -> dict[str, Any]:
    return {
        "sizes": SIZES,
        "sampler": SAMPLERS,
        "scheduler": SCHEDULERS,
        "ref_image_size": REF_IMAGE_SIZES,
        "fps": FPS,
    }


def _requests() -> list[dict[str, Any]]:
    """Every preset with the request it stands for, of both families."""
    return [{"name": name, "request": request_json(name)} for name in presets.names("requests")]
