"""The look: one Gradio theme, one style sheet, the header; nothing is fetched from outside."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

from app import presets
from app.session import Session
from panels import views, widgets

CSS_FILE = Path(__file__).with_name("web") / "theme.css"

_DEMO = (
    "<div class='banner' role='note'><strong>Demo model.</strong> Its weights are random, so it "
    "makes coloured noise whatever the prompt says. It shows that the whole path works; for real "
    "videos start the console with a plan that names H3's checkpoints.</div>"
)


def theme() -> gr.themes.Base:
    """Neutral greys and one teal; system fonts, as the page may load nothing from elsewhere."""
    accent, on_accent = "var(--h3-accent)", "var(--h3-accent-ink)"
    return gr.themes.Base(
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "monospace"],
        primary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_md,
    ).set(
        body_background_fill="var(--h3-bg)",
        body_background_fill_dark="var(--h3-bg)",
        body_text_color="var(--h3-ink)",
        body_text_color_dark="var(--h3-ink)",
        block_background_fill="var(--h3-card)",
        block_background_fill_dark="var(--h3-card)",
        border_color_primary="var(--h3-line)",
        border_color_primary_dark="var(--h3-line)",
        input_background_fill="var(--h3-field)",
        input_background_fill_dark="var(--h3-field)",
        button_primary_background_fill=accent,
        button_primary_background_fill_dark=accent,
        button_primary_background_fill_hover=accent,
        button_primary_background_fill_hover_dark=accent,
        button_primary_text_color=on_accent,
        button_primary_text_color_dark=on_accent,
        button_secondary_background_fill="transparent",
        button_secondary_background_fill_dark="transparent",
        button_secondary_border_color="var(--h3-line)",
        button_secondary_border_color_dark="var(--h3-line)",
        button_secondary_text_color="var(--h3-ink)",
        button_secondary_text_color_dark="var(--h3-ink)",
    )


def page_header(session: Session) -> gr.HTML:
    """Name, engine state, and the warning of the demo model; returns the state's component."""
    chip = widgets.chip(views.chip(session.snapshot(), session.plan))
    if presets.is_demo(session.plan):
        gr.HTML(_DEMO, elem_id="demo-banner")
    return chip
