"""The result card of the Generate panel: progress, preview, player, notes, stage table."""

from __future__ import annotations

import gradio as gr

from panels.widgets import part

_TEMPLATE = (
    "<section class='h3card run' aria-label='Result' data-state='idle'>"
    "<div class='run-top'><h2 class='run-title'>Result</h2><span class='run-phase'></span>"
    "<span class='run-clock'></span></div>"
    "<div class='bar' role='progressbar' aria-label='Progress' aria-valuemin='0' hidden>"
    "<div class='bar-fill'></div></div>"
    "<div class='run-error' role='alert' hidden></div>"
    "<div class='screen'><img class='preview' alt='Preview of the video so far' hidden>"
    "<video controls playsinline preload='metadata' hidden></video>"
    "<div class='stage-empty'>The video appears here.</div></div>"
    "<div class='provenance' hidden></div>"
    "<div class='run-facts'></div><div class='run-prompt' hidden></div>"
    "<div class='run-acts'></div>"
    "<details class='more notes-box' open hidden><summary>Notes</summary>"
    "<ul class='notes'></ul></details>"
    "<details class='more times-box' hidden><summary>Stages</summary>"
    "<table class='times'><tbody></tbody></table></details>"
    "<details class='more facts-box' hidden><summary>Request and plan</summary>"
    "<table class='times'><tbody></tbody></table></details></section>"
)


def build() -> gr.HTML:
    """The job that runs, or the one a person chose, or the one that ended last."""
    return part("result", _TEMPLATE, scripts=("times",))
