"""The browser console: PANELS in tab order, and build_ui, which draws them over a Session."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gradio as gr

    from app.session import Session

PANELS = ("generate",)  # each a file here with TITLE and build(session, chip)


def build_ui(session: Session) -> gr.Blocks:
    """The whole page; a single panel needs no tabs."""
    import gradio as gr  # costs seconds of CPU: `launch.py serve` reads its arguments first

    from panels.theme import page_header

    modules = [importlib.import_module(f"panels.{name}") for name in PANELS]
    with gr.Blocks(title="H3 console", analytics_enabled=False) as page:
        chip = page_header(session)
        if len(modules) == 1:
            modules[0].build(session, chip)
        else:
            with gr.Tabs():
                for module in modules:
                    with gr.Tab(module.TITLE):
                        module.build(session, chip)
    return page
