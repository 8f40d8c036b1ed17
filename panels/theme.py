"""The look: one Gradio theme, the style sheets and shared scripts of web/; nothing from outside."""

from __future__ import annotations

import gradio as gr

from panels.widgets import WEB

# Inlined into the page in this order: the first defines window.h3, the others add to it.
SHARED = (
    *("lib", "events", "shell", "plot", "jobs", "families", "kept", "draft", "options", "licence"),
)


def css() -> str:
    """theme.css and then every panel's own rules."""
    files = sorted(WEB.glob("*.css"), key=lambda path: (path.name != "theme.css", path.name))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def head() -> str:
    """The shared scripts as one element of the page's head."""
    return (
        "<script>"
        + "\n".join((WEB / f"{name}.js").read_text(encoding="utf-8") for name in SHARED)
        + "</script>"
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
        checkbox_background_color_selected=accent,
        checkbox_background_color_selected_dark=accent,
        checkbox_border_color_selected=accent,
        checkbox_border_color_selected_dark=accent,
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
