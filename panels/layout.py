"""Backends: what this machine can run, plans to choose and change, two plans against each other."""

from __future__ import annotations

import gradio as gr

from app.console import Console
from panels import widgets

TITLE = "Backends"

_MACHINE = (
    "<section class='h3card ly-card' aria-label='This machine'><div class='ly-head'>"
    "<h2 class='sub'>This machine</h2><span class='ly-when'></span>"
    "<button class='quiet ly-again' type='button'>Probe again</button></div>"
    "<div class='alert ly-alert' role='alert' hidden></div>"
    "<div class='note ly-wait' role='status' hidden></div>"
    "<ul class='ly-problems' hidden></ul><dl class='ly-facts'></dl>"
    "<h3 class='ly-title'>Layouts</h3><ul class='ly-layouts'></ul></section>"
)
_BACKENDS = (
    "<section class='h3card ly-card' aria-label='Backends'><div class='ly-head'>"
    "<h2 class='sub'>Backends</h2><span class='ly-when ly-legend'>Tried on this machine with a "
    "small computation; lossy ones round more than the weights do.</span></div>"
    "<div class='ly-sections'></div></section>"
)
_EDITOR = (
    "<section class='h3card ly-card' aria-label='Plan'><div class='ly-head'>"
    "<h2 class='sub'>Plan</h2><span class='pill ly-family'></span>"
    "<span class='pill ly-origin'></span></div>"
    "<div class='fields'>"
    + widgets.field("Begin with", "<select class='ly-base'></select>", "grow")
    + "<button class='quiet ly-use' type='button'>Use for Generate</button>"
    "<button class='quiet danger ly-delete' type='button' hidden>Delete</button></div>"
    "<div class='alert ly-plan-alert' role='alert' hidden></div>"
    "<div class='ly-fields'></div>"
    "<details class='more ly-files'><summary>Model files</summary><div class='ly-paths'></div>"
    "</details>"
    "<div class='ly-differs'><h3 class='ly-title'>Changed</h3><ul class='ly-changes'></ul></div>"
    "<div class='fields ly-save-row'>"
    + widgets.field(
        "Name", "<input class='ly-name' autocomplete='off' maxlength='60' spellcheck='false'>"
    )
    + "<button class='quiet ly-check' type='button'>Check</button>"
    "<button class='primary ly-save' type='button'>Save plan</button></div>"
    "<div class='ly-verdict' role='status' hidden></div></section>"
)
_PAIR = (
    "<section class='h3card ly-card' aria-label='A against B'><div class='ly-head'>"
    "<h2 class='sub'>A against B</h2></div>"
    "<p class='ly-words'>The request of the Generate form, with the same seed, on two plans next "
    "to each other in the queue.</p><p class='ly-request'></p>"
    "<div class='fields'>"
    + widgets.field("Plan A", "<select class='ly-a'></select>", "grow")
    + widgets.field("Plan B", "<select class='ly-b'></select>", "grow")
    + "</div><ul class='ly-changes ly-between'></ul>"
    "<div class='alert ly-pair-alert' role='alert' hidden></div>"
    "<label class='check ly-force' hidden><input type='checkbox' class='ly-forced'>"
    "<span>Queue it although it may not fit</span></label>"
    "<button class='primary ly-both' type='button'>Queue both</button>"
    "<ul class='ly-pairs'></ul></section>"
)
_TEMPLATE = (
    "<div class='ly'><div class='ly-left'>" + _MACHINE + _BACKENDS + "</div>"
    "<div class='ly-right'>" + _EDITOR + _PAIR + "</div></div>"
)


def build(console: Console, chip: gr.HTML) -> None:
    """One part, which talks to /api/v1/backends, /plans, /preflight and /jobs."""
    widgets.part("layout", _TEMPLATE, scripts=("backends", "fields", "editor", "pair"))
