"""The Generate panel: the form on the left; the run and the queue on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gradio as gr

from panels import widgets

if TYPE_CHECKING:
    from app.console import Console

TITLE = "Generate"


def build(console: Console, chip: gr.HTML) -> None:
    """Draws the panel into the open Blocks; `chip` is the header."""
    with gr.Row(elem_classes="cols"):
        widgets.part("form", "<section class='h3card' aria-label='Request'></section>")
