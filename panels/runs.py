"""Runs: the history, one run in full, and two runs side by side."""

from __future__ import annotations

import gradio as gr

from app.console import Console
from panels import widgets

TITLE = "Runs"

_FILTERS = (
    "<form class='rv-filters' role='search' aria-label='Filter runs'>"
    "<input class='seek rv-q' type='search' placeholder='Search prompts and ids' "
    "aria-label='Search prompts and ids' autocomplete='off'>"
    "<select class='pick rv-plan' aria-label='Plan'></select>"
    "<select class='pick rv-state' aria-label='State'></select>"
    "<select class='pick rv-kind' aria-label='Kind'></select>"
    "<label class='rv-date'><span>from</span><input class='seek rv-from' type='date'></label>"
    "<label class='rv-date'><span>to</span><input class='seek rv-to' type='date'></label>"
    "<button class='quiet rv-clear' type='reset' hidden>Clear</button>"
    "<div class='switch rv-as' role='group' aria-label='Layout'>"
    "<button type='button' data-as='grid'>Grid</button>"
    "<button type='button' data-as='list'>List</button></div></form>"
)
_LIST = (
    f"<div class='rv-list'>{_FILTERS}"
    "<p class='rv-empty' hidden></p><ul class='rv-runs' data-as='grid'></ul>"
    "<button class='quiet rv-more' type='button' hidden>Show older runs</button>"
    "<div class='rv-chosen' role='status' hidden><span class='rv-count'></span>"
    "<button class='quiet rv-none' type='button'>Clear</button>"
    "<button class='quiet strong rv-compare' type='button'>Compare</button></div></div>"
)
_ONE = (
    "<article class='rv-one' hidden><div class='rv-bar'>"
    "<button class='quiet rv-back' type='button'>← All runs</button>"
    "<div class='tools'></div></div>"
    "<div class='rv-ask' role='alertdialog' aria-label='Delete' hidden>"
    "<span>Delete this run with its video, latents and timings? This cannot be undone.</span>"
    "<button class='quiet danger rv-yes' type='button'>Delete</button>"
    "<button class='quiet rv-no' type='button'>Keep it</button></div>"
    "<div class='rv-cols'><div class='rv-left'><div class='screen rv-screen'>"
    "<video controls playsinline preload='metadata' hidden></video>"
    "<img class='rv-preview' alt='Preview of the running step' hidden>"
    "<div class='stage-empty'></div></div>"
    "<p class='rv-prompt'></p><div class='alert rv-reason' role='alert' hidden></div>"
    "<ul class='words rv-shape' aria-label='Shape'></ul>"
    "<section class='rv-refs' hidden><h2 class='sub'>References</h2><ol></ol></section>"
    "<section class='rv-notes' hidden><h2 class='sub'>Notes</h2><ul class='notes'></ul></section>"
    "</div><div class='rv-right'><dl class='pairs rv-facts'></dl>"
    "<section class='rv-times' hidden><h2 class='sub'>Stages</h2><div class='scroll'>"
    "<table class='figures'><tbody></tbody></table></div></section>"
    "<details><summary>Plan, kernels, versions</summary><dl class='pairs rv-plan-facts'></dl>"
    "</details></div></div></article>"
)
_PLAYER = (
    "<div class='ab' data-mode='wipe' tabindex='0' role='group' aria-label='Players A and B'>"
    "<figure class='ab-a'><video playsinline preload='auto'></video>"
    "<figcaption>A</figcaption></figure>"
    "<figure class='ab-b'><video playsinline preload='auto' muted></video>"
    "<figcaption>B</figcaption></figure>"
    "<span class='ab-line' aria-hidden='true'></span>"
    "<input class='ab-wipe' type='range' min='0' max='100' step='0.5' value='50' "
    "aria-label='Wipe between A and B'><p class='ab-none' hidden></p></div>"
    "<div class='ab-controls'>"
    "<button class='quiet ab-play' type='button'>Play</button>"
    "<button class='quiet ab-less' type='button' aria-label='One frame back' title='One frame "
    "back (,)'>‹</button>"
    "<button class='quiet ab-next' type='button' aria-label='One frame on' title='One frame on "
    "(.)'>›</button>"
    "<input class='ab-seek' type='range' min='0' value='0' step='1' aria-label='Frame'>"
    "<output class='ab-frame'></output>"
    "<div class='switch ab-sound' role='group' aria-label='Sound'>"
    "<button type='button' data-sound='a' aria-pressed='true'>Sound A</button>"
    "<button type='button' data-sound='b' aria-pressed='false'>B</button>"
    "<button type='button' data-sound='' aria-pressed='false'>off</button></div>"
    "<button class='quiet ab-loop' type='button' aria-pressed='true'>Loop</button>"
    "<select class='pick ab-rate' aria-label='Speed'><option value='0.25'>¼ speed</option>"
    "<option value='0.5'>½ speed</option><option value='1' selected>Full speed</option></select>"
    "</div>"
)
_TWO = (
    "<article class='rv-two' hidden><div class='rv-bar'>"
    "<button class='quiet rv-back' type='button'>← All runs</button>"
    "<div class='tools'><div class='switch ab-modes' role='group' aria-label='View'>"
    "<button type='button' data-mode='wipe' aria-pressed='true'>Wipe</button>"
    "<button type='button' data-mode='side' aria-pressed='false'>Side by side</button>"
    "<button type='button' data-mode='difference' aria-pressed='false' "
    "title='Black where both agree; differences four times as bright'>Difference</button></div>"
    "<button class='quiet rv-swap' type='button'>Swap A and B</button></div></div>"
    "<div class='rv-names'><div class='rv-name' data-side='a'></div>"
    f"<div class='rv-name' data-side='b'></div></div>{_PLAYER}"
    "<p class='tm-note ab-note'></p><div class='rv-tables'><div class='rv-side'>"
    "<section class='rv-differ'><h2 class='sub'>Settings that differ</h2><div class='scroll'>"
    "<table class='figures plain'><thead></thead><tbody></tbody></table></div>"
    "<p class='tm-note' hidden></p></section>"
    "<section class='rv-parity'><h2 class='sub'>Latents, B against A</h2><div class='scroll'>"
    "<table class='figures'><thead></thead><tbody></tbody></table></div>"
    "<p class='tm-note'></p></section></div>"
    "<section class='rv-delta'><h2 class='sub'>Times, B against A</h2><div class='scroll'>"
    "<table class='figures'><thead></thead><tbody></tbody></table></div>"
    "<p class='tm-note'></p></section></div></article>"
)
_RUNS = (
    "<section class='rv' aria-label='Runs'><div class='alert rv-alert' role='alert' hidden></div>"
    f"{_LIST}{_ONE}{_TWO}</section>"
)


def build(console: Console, chip: gr.HTML) -> None:
    """One part, which talks to /api/v1/runs."""
    with gr.Column(elem_classes="h3card"):
        widgets.part("runs", _RUNS, scripts=("stages", "run", "players", "compare"))
