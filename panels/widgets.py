"""The page's own HTML parts: constant templates, and scripts that put values in as text only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

_WEB = Path(__file__).with_name("web")

_CHIP = (
    "<div class='head'><h1 class='head-name'>H3 console</h1>"
    "<span class='head-sub'>Video with sound from a prompt and references</span>"
    "<span class='chip' role='status'><span class='chip-dot'></span>"
    "<span class='chip-text'></span></span></div>"
)
_ALERT = "<div class='alert' role='alert' hidden></div>"
_STRIP = (
    "<div class='strip-empty'>Up to 9 pictures, 3 videos and 3 sounds. Their order gives the "
    "numbers that the prompt uses, such as &lt;Picture 1&gt;.</div><ol class='strip'></ol>"
)
_RUN = (
    "<section class='run' aria-label='Result'>"
    "<div class='run-top'><span class='run-title'></span><span class='run-phase'></span>"
    "<span class='run-clock'></span></div>"
    "<div class='bar' role='progressbar' aria-label='Progress' aria-valuemin='0' hidden>"
    "<div class='bar-fill'></div></div>"
    "<div class='run-error' role='alert' hidden></div>"
    "<div class='screen'><video controls playsinline preload='auto' hidden></video>"
    "<div class='stage-empty'></div></div>"
    "<div class='run-under'><span class='run-facts'></span>"
    "<a class='save' hidden>Save mp4</a></div>"
    "<div class='run-waiting'></div>"
    "<div hidden><h2 class='sub'>Notes</h2><ul class='notes'></ul></div>"
    "<div class='times-box' hidden><h2 class='sub'>Stages</h2>"
    "<table class='times'><tbody></tbody></table></div></section>"
)


def chip(value: dict[str, Any]) -> gr.HTML:
    """Page name and engine state, from views.chip."""
    return _part("chip", _CHIP, value)


def alert() -> gr.HTML:
    """One sentence {"text": ...} that a person must read; hidden while empty."""
    return _part("alert", _ALERT, {"text": ""})


def strip() -> gr.HTML:
    """The ordered references, from views.strip; its buttons raise `apply` with act and index."""
    return _part("strip", _STRIP, {"items": []})


def run(value: dict[str, Any]) -> gr.HTML:
    """Progress, player, notes and stage table of one run, from views.run."""
    return _part("run", _RUN, value)


def _part(name: str, template: str, value: dict[str, Any]) -> gr.HTML:
    script = (_WEB / f"{name}.js").read_text(encoding="utf-8")
    return gr.HTML(value, html_template=template, js_on_load=script, elem_id=f"part-{name}")
