"""The browser console: PANELS in tab order, and build_ui, which draws them over a Console."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gradio as gr

    from app.console import Console

# Each a file here with TITLE and build(console, chip), its script and rules in web/.
PANELS = ("generate", "layout", "timing", "telemetry", "parity", "runs")


def build_ui(console: Console) -> gr.Blocks:
    """The whole page: the header, and one tab per panel, whose script starts when it is opened."""
    import gradio as gr  # costs seconds of CPU: `launch.py serve` reads its arguments first

    from panels import widgets
    from panels.first import first_draft

    modules = {name: importlib.import_module(f"panels.{name}") for name in PANELS}
    with gr.Blocks(title="Video console", analytics_enabled=False) as page:
        titles = [(name, module.TITLE) for name, module in modules.items()]
        chip = widgets.header(titles, first_draft(console.session.plan))
        with gr.Tabs(elem_id="panels"):
            for name, module in modules.items():
                with gr.Tab(module.TITLE, id=name, elem_id=f"tab-{name}"):
                    module.build(console, chip)
        widgets.footer()
    return page
