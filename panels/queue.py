"""The queue card of the Generate panel: what runs, what waits, what ended of late."""

from __future__ import annotations

import gradio as gr

from panels.widgets import part

_TEMPLATE = (
    "<section class='h3card queue' aria-label='Queue'><div class='queue-top'>"
    "<h2 class='sub'>Queue</h2><span class='queue-count'></span>"
    "<button class='quiet pause' type='button' aria-pressed='false'>Pause</button></div>"
    "<div class='note paused' role='status' hidden>The queue is paused: what runs goes on, and "
    "nothing new starts.</div><div class='alert' role='alert' hidden></div>"
    "<ol class='jobs open'></ol><div class='queue-empty'>Nothing waits.</div>"
    "<h2 class='sub ended-title' hidden>Ended</h2><ol class='jobs ended'></ol></section>"
)


def build() -> gr.HTML:
    """Jobs of everybody, with the buttons that this user may press."""
    return part("queue", _TEMPLATE)
