"""Parity: goldens against this machine's replay, step by step, with pictures of the difference."""

from __future__ import annotations

import gradio as gr

from app.console import Console
from panels import widgets

TITLE = "Parity"

_FILE = widgets.field(
    "File", "<input class='pa-file' type='file' accept='.safetensors,.zip'>", "grow"
)
_PATH = widgets.field(
    "Or a folder of this machine",
    "<input class='pa-path' type='text' placeholder='/path/to/goldens' autocomplete='off' "
    "spellcheck='false'>",
    "grow",
)
_PLAN = widgets.field("Settings", "<select class='pa-plan'></select>", "grow")
_GOLDENS = (
    "<section class='pa-choose' aria-label='Goldens'><div class='pa-head'>"
    "<h2 class='sub'>Goldens</h2><span class='pa-count' role='status'></span></div>"
    "<div class='pa-filters'>"
    "<input class='seek pa-seek' type='search' placeholder='Search cases' autocomplete='off' "
    "aria-label='Search cases'>"
    "<select class='pick pa-kind' aria-label='Kind'></select>"
    "<select class='pick pa-from' aria-label='Collection'></select></div>"
    "<div class='scroll pa-list' tabindex='0' aria-label='List of goldens'>"
    "<table class='figures pa-goldens'><thead><tr><th scope='col'>"
    "<input type='checkbox' class='pa-all' aria-label='Choose all that are shown'></th>"
    "<th scope='col' class='left'>Case</th><th scope='col' class='left'>Shape</th>"
    "<th scope='col' class='left'>Dtype switches</th><th scope='col' class='left'>ComfyUI</th>"
    "<th scope='col' class='left'>torch, comfy-kitchen</th><th scope='col'>Tensors</th></tr>"
    "</thead><tbody></tbody></table></div>"
    "<p class='pa-none' hidden>No golden matches.</p>"
    "<details class='more pa-more'><summary>Import goldens</summary>"
    "<div class='pa-import'><p class='tm-note'>A .safetensors golden (from our ComfyUI node, or "
    "a copy of one here), or a .zip of goldens with their folder <code>checkpoints</code>. Only "
    "safetensors files are taken.</p><form class='fields pa-upload'>"
    f"{_FILE}"
    "<button class='quiet' type='submit'>Upload</button></form>"
    "<form class='fields pa-folder' hidden>"
    f"{_PATH}"
    "<button class='quiet' type='submit'>Import</button></form>"
    "<ul class='pa-collections'></ul></div></details></section>"
)
_START = (
    "<form class='pa-start'>"
    f"{_PLAN}"
    "<button class='primary pa-go' type='submit' disabled>Run</button>"
    "<p class='tm-note pa-hint'></p></form>"
)
_RUN = (
    "<section class='pa-run' aria-label='Parity run' hidden><div class='tm-top'>"
    "<label class='tm-pick'><span class='label'>Run</span>"
    "<select class='pick pa-history'></select></label><div class='tools'>"
    "<button class='quiet pa-cancel' type='button' hidden>Cancel</button>"
    "<button class='quiet pa-again' type='button' hidden>Choose the same</button></div></div>"
    "<div class='pa-now' role='status'><span class='pill pa-state'></span>"
    "<span class='pa-stage'></span></div>"
    "<div class='bar pa-bar' role='progressbar' aria-label='Progress' aria-valuemin='0' hidden>"
    "<div class='bar-fill'></div></div>"
    "<div class='alert pa-reason' role='alert' hidden></div>"
    "<ul class='pa-counts' aria-label='How the cases ended'></ul>"
    "<div class='scroll pa-cases-box'><table class='figures pa-cases'><thead><tr>"
    "<th scope='col' class='left'>Case</th><th scope='col' class='left'>Result</th>"
    "<th scope='col'>Bit-equal</th><th scope='col' class='left'>First divergence</th>"
    "<th scope='col' class='left'>Gate</th><th scope='col'>Time</th></tr></thead>"
    "<tbody></tbody></table></div></section>"
)
_FRAMES = (
    "<div class='pa-head'><h3 class='sub'>Frames</h3><span class='tm-note pa-source'></span></div>"
    "<div class='pa-panes'><figure><canvas class='pa-golden'></canvas>"
    "<figcaption>Golden</figcaption></figure><figure><canvas class='pa-ours'></canvas>"
    "<figcaption>Ours</figcaption></figure><figure><canvas class='pa-heat'></canvas>"
    "<figcaption>Difference</figcaption></figure></div>"
    "<div class='pa-strip' aria-hidden='true'></div>"
    "<input class='pa-seekframe' type='range' min='0' value='0' step='1' aria-label='Frame'>"
    "<div class='pa-controls'><button class='quiet pa-back' type='button' "
    "aria-label='One frame back'>‹</button><button class='quiet pa-on' type='button' "
    "aria-label='One frame on'>›</button><output class='pa-frame'></output>"
    "<button class='quiet pa-join' type='button' hidden>Next join</button>"
    "<button class='quiet pa-worst' type='button'>Worst frame</button>"
    "<label class='pa-gain'><span>Gain</span><input type='range' min='0' max='14' step='0.5' "
    "value='0' aria-label='Gain of the difference'><output></output></label></div>"
    "<div class='pa-legend'><span class='pa-ramp' aria-hidden='true'></span>"
    "<span class='tm-note pa-scale'></span></div>"
)
_CASE = (
    "<section class='pa-case' aria-label='Case' hidden><div class='pa-head'>"
    "<h2 class='sub pa-name' tabindex='-1'></h2><span class='pill pa-status'></span></div>"
    "<ul class='words pa-settings' aria-label='Settings of the replay'></ul>"
    "<div class='pa-first'></div>"
    "<div class='pa-bars'><div class='switch pa-which' role='group' aria-label='Replay'>"
    "<button type='button' data-run='free' aria-pressed='true'>Free run</button>"
    "<button type='button' data-run='staged' aria-pressed='false'>Staged</button></div>"
    "<div class='switch pa-form' role='group' aria-label='Form of the computation' hidden></div>"
    "<div class='switch pa-metric' role='group' aria-label='Figure'>"
    "<button type='button' data-metric='relative_l2' aria-pressed='true'>rel. L2</button>"
    "<button type='button' data-metric='max_abs' aria-pressed='false'>max</button>"
    "<button type='button' data-metric='mean_abs' aria-pressed='false'>mean</button>"
    "<button type='button' data-metric='cosine' aria-pressed='false'>cosine</button>"
    "<button type='button' data-metric='psnr' aria-pressed='false'>PSNR</button></div></div>"
    "<p class='tm-note pa-about'></p>"
    "<div class='pa-plots'><figure><figcaption>Video</figcaption>"
    "<div class='pa-plot' data-part='video'></div></figure><figure><figcaption>Audio</figcaption>"
    "<div class='pa-plot' data-part='audio'></div></figure></div>"
    f"<div class='pa-frames' hidden>{_FRAMES}</div>"
    "<div class='pa-tables'><section class='pa-steps'><div class='pa-head'>"
    "<h3 class='sub'>Steps</h3><div class='switch pa-part' role='group' aria-label='Stream'>"
    "<button type='button' data-part='video' aria-pressed='true'>Video</button>"
    "<button type='button' data-part='audio' aria-pressed='false'>Audio</button></div></div>"
    "<div class='scroll' tabindex='0' aria-label='Figures per step'>"
    "<table class='figures'><thead></thead><tbody></tbody></table></div></section>"
    "<section class='pa-stages'><h3 class='sub'>Stages</h3>"
    "<div class='scroll' tabindex='0' aria-label='Figures per stage'>"
    "<table class='figures'><thead></thead><tbody></tbody></table></div></section></div></section>"
)
_PARITY = (
    "<div class='pa tm'><div class='alert pa-alert' role='alert' hidden></div>"
    f"<div class='pa-top'>{_GOLDENS}{_START}</div>{_RUN}{_CASE}</div>"
)


def build(console: Console, chip: gr.HTML) -> None:
    """One part, which talks to /api/v1/parity."""
    with gr.Column(elem_classes="h3card"):
        scripts = ("parity_goldens", "parity_steps", "parity_frames")
        widgets.part("parity", _PARITY, scripts=scripts)
