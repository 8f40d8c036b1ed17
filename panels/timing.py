"""Timing: where the seconds of a run went, against a pinned run; layouts and benchmarks."""

from __future__ import annotations

import gradio as gr

from app.console import Console
from panels import widgets

TITLE = "Timing"

_TIMING = (
    "<section class='tm' aria-label='Timing'>"
    "<div class='tm-top'><label class='tm-pick'><span class='label'>Run</span>"
    "<select class='pick tm-run'></select></label>"
    "<span class='tm-live' role='status' hidden>live</span>"
    "<div class='tools'>"
    "<button class='quiet tm-open' type='button'>Open run</button>"
    "<button class='quiet tm-pin' type='button' aria-pressed='false'>Pin as baseline</button>"
    "<a class='quiet tm-json' download>JSON</a><a class='quiet tm-csv' download>CSV</a></div></div>"
    "<div class='alert tm-alert' role='alert' hidden></div>"
    "<p class='tm-empty' hidden>No run yet. Generate something, and its seconds appear here while "
    "it runs.</p>"
    "<div class='tm-body' hidden>"
    "<dl class='tm-facts'></dl>"
    "<div class='tm-given'><ul class='words tm-shape' aria-label='Shape'></ul>"
    "<details><summary>Conditions: plan, kernels, versions</summary>"
    "<dl class='pairs tm-conditions'></dl></details></div>"
    "<div class='tm-figure'><div class='tm-head'><h2 class='sub'>Stages</h2>"
    "<div class='switch tm-by' role='group' aria-label='Rows' hidden>"
    "<button type='button' data-by='stage' aria-pressed='true'>by stage</button>"
    "<button type='button' data-by='rank' aria-pressed='false'>by rank</button></div></div>"
    "<div class='tm-fall'></div></div>"
    "<div class='tm-figure'><div class='tm-head'><h2 class='sub'>Steps</h2>"
    "<label class='tm-which' hidden><span>Rank</span><select class='pick tm-rank'></select></label>"
    "</div><p class='tm-note tm-parts' hidden></p><div class='tm-steps'></div></div>"
    "<div class='tm-figure'><h2 class='sub'>Table</h2><p class='tm-note tm-base'></p>"
    "<div class='scroll'><table class='figures tm-table'><thead></thead><tbody></tbody></table>"
    "</div></div></div></section>"
)

_MEASURED = (
    "<section class='tm ms' aria-label='Layouts and benchmarks'>"
    "<div class='tm-head'><h2 class='sub'>Layouts and benchmarks</h2></div>"
    "<div class='tm-top'><label class='tm-pick'><span class='label'>Measurement</span>"
    "<select class='pick ms-one'></select></label>"
    "<div class='tools'><a class='quiet ms-json' download>JSON</a></div></div>"
    "<div class='alert ms-alert' role='alert' hidden></div>"
    "<p class='tm-empty ms-empty' hidden>Nothing is measured yet. <code>launch.py sweep --plan "
    "NAME</code> measures every layout that this machine can hold, <code>launch.py bench</code> "
    "one plan or two in turns; both appear here.</p>"
    "<div class='tm-body ms-body' hidden>"
    "<div class='tm-given'><ul class='words ms-shape' aria-label='Shape'></ul>"
    "<p class='tm-note ms-ratio' hidden></p>"
    "<details><summary>Conditions: machine, versions, kernels</summary>"
    "<dl class='pairs ms-conditions'></dl></details></div>"
    "<div class='tm-figure'><h2 class='sub'>Seconds per step</h2>"
    "<div class='ms-steps'></div></div>"
    "<div class='tm-figure'><h2 class='sub'>Table</h2><p class='tm-note ms-note'></p>"
    "<div class='scroll'><table class='figures ms-table'><thead></thead><tbody></tbody>"
    "</table></div></div></div></section>"
)


def build(console: Console, chip: gr.HTML) -> None:
    """Two parts, which talk to /api/v1/runs and /api/v1/measurements."""
    with gr.Column(elem_classes="h3card"):
        widgets.part("timing", _TIMING, scripts=("stages", "waterfall"))
    with gr.Column(elem_classes="h3card"):
        widgets.part("measured", _MEASURED, scripts=("stages", "waterfall"))
