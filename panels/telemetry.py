"""Telemetry: GPUs, buses and host over the last minutes, with the runs and their stages."""

from __future__ import annotations

import gradio as gr

from app.console import Console
from panels import widgets

TITLE = "Telemetry"

_TELEMETRY = (
    "<section class='tl' aria-label='Telemetry'>"
    "<div class='tl-top'><div class='tl-about'><h2 class='sub tl-what'></h2>"
    "<p class='tl-driver'></p></div><div class='tl-tools'>"
    "<button class='quiet tl-live' type='button' hidden>Back to now</button>"
    "<button class='quiet tl-fast' type='button' aria-pressed='false' "
    "title='Ten samples a second for one minute'>10 Hz</button>"
    "<div class='switch tl-window' role='group' aria-label='Time shown'>"
    "<button type='button' data-seconds='120'>2 min</button>"
    "<button type='button' data-seconds='600'>10 min</button>"
    "<button type='button' data-seconds='1800'>30 min</button></div></div></div>"
    "<div class='alert tl-alert' role='alert' hidden></div>"
    "<div class='alert tl-lost' role='status' hidden></div>"
    "<p class='note tl-none' role='status' hidden></p>"
    "<div class='tl-tiles' role='group' aria-label='GPUs; press one to hide its lines' hidden>"
    "</div>"
    "<div class='tl-lane' hidden><span class='tl-lanename'>Stages</span>"
    "<div class='tl-stages' role='img' aria-label='Stages of the runs over time'></div></div>"
    "<p class='tl-key' hidden><span><i></i>a run begins or ends</span>"
    "<span><i data-kind='stage'></i>a stage begins</span>"
    "<span><i data-kind='band'></i>its stage, above each plot</span>"
    "<span><i data-kind='limit'></i>a limit</span></p>"
    "<div class='tl-plots'></div><p class='tl-missing' hidden></p>"
    "<div class='tl-wires'><details class='more tl-linksbox' hidden>"
    "<summary>Each NVLink</summary>"
    "<div class='tl-links'></div><p class='tl-scale'></p></details>"
    "<details class='more tl-topobox' hidden open><summary>Topology</summary>"
    "<div class='scroll'><table class='tl-topo'></table></div><p class='tl-legend'></p></details>"
    "</div>"
    "</section>"
)


def build(console: Console, chip: gr.HTML) -> None:
    """One part, which talks to /api/v1/telemetry and to the event stream."""
    with gr.Column(elem_classes="h3card"):
        widgets.part("telemetry", _TELEMETRY, scripts=("readings", "gauges"))
