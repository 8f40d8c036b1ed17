"""LTX's part of the Generate form: a first frame, sizes, frames, fps, seed; all else is fixed."""

from __future__ import annotations

import gradio as gr

from panels.widgets import field, part
from runtime.messages import LTX_FPS, LTX_FRAMES, LTX_SIZE_MULTIPLE, LTX_STAGE_STEPS

_WIDE = ("768×512", "1024×576", "1280×704", "1920×1088")
_SIZES = (*_WIDE, "512×768", "704×1280", "768×768", "128×128")

_WHOLE = (
    "<input id='ltx-{0}' data-field='ltx_{0}' type='number' min='{1}' max='{2}' step='{3}' "
    "inputmode='numeric' autocomplete='off'>"
)
_FRAME = (
    "<section class='refs-box' aria-label='First frame'><div class='refs-head'>"
    "<h2 class='sub'>First frame</h2><span class='refs-count'>optional</span>"
    "<button class='quiet add-frame' type='button'>Choose a picture</button>"
    "<input class='pick-frame' type='file' accept='image/*' hidden tabindex='-1'></div>"
    "<div class='refs-empty'>Drop, paste or choose one picture: the video begins with it, cut to "
    "the middle where its aspect is another one. One of our own mp4s brings back its settings."
    "</div><div class='frame'></div><ul class='loads' aria-live='polite'></ul></section>"
)
_NUMBERS = (
    "<div class='fields'>"
    + field("Size", "<select class='size'></select>", "grow")
    + field("Width", _WHOLE.format("width", LTX_SIZE_MULTIPLE, 4096, LTX_SIZE_MULTIPLE))
    + "<button class='sign turn' type='button' title='Swap width and height' "
    "aria-label='Swap width and height'></button>"
    + field("Height", _WHOLE.format("height", LTX_SIZE_MULTIPLE, 4096, LTX_SIZE_MULTIPLE))
    + "</div><div class='fields'>"
    + field("Frames", _WHOLE.format("frames", *LTX_FRAMES, 8))
    + field("Frames a second", _WHOLE.format("fps", *LTX_FPS, 1))
    + field(
        "Seed",
        "<input id='ltx-seed' data-field='seed' inputmode='numeric' autocomplete='off' "
        "spellcheck='false'>",
        "grow",
    )
    + "<button class='sign dice' type='button' title='New seed' aria-label='New seed'></button>"
    "</div><div class='snap' aria-live='polite'></div>"
    f"<p class='recipe'>{' + '.join(map(str, LTX_STAGE_STEPS))} steps, two stages: at half the "
    "size, then at the whole. The recipe is fixed, there is no CFG.</p>"
    "<p class='recipe licence-line' hidden></p>"
    "<div class='note licence-note' hidden><span class='licence-words'></span>"
    "<button class='quiet licence-open' type='button'>Read it</button></div>"
)


def build() -> gr.HTML:
    """The fields of LTX; it can be seen while the draft's family is LTX."""
    return part("ltx", _FRAME + _NUMBERS, {"sizes": _SIZES}, scripts=("upload", "snap"))
