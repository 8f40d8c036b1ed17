"""The page's own HTML parts: constant templates, and scripts that put values in as text only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gradio as gr

WEB = Path(__file__).with_name("web")

_HEADER = (
    "<header class='head'><div class='head-row'><h1 class='head-name'>Video console</h1>"
    "<div class='head-end'>"
    "<span class='chip' role='status'><span class='chip-dot'></span>"
    "<span class='chip-text'>connecting</span></span>"
    "<a class='share' target='_blank' rel='noopener' hidden>Shared link</a>"
    "<button class='sign bell' type='button' aria-label='Notify me when a job ends'>"
    "<svg viewBox='0 0 24 24' aria-hidden='true'><path d='M6 16V11a6 6 0 0 1 12 0v5l1.5 2h-15z"
    "M10 20.5h4'/></svg></button>"
    "<button class='sign theme' type='button'></button>"
    "<span class='who' hidden><span class='who-name'></span>"
    "<button class='quiet out' type='button'>Sign out</button></span></div></div>"
    "<div class='h3tabs' role='tablist' aria-label='Panels'></div>"
    "<div class='offline' role='status' hidden>The console does not answer. What runs goes on; "
    "this page connects again by itself.</div></header>"
)
_LICENCE = (
    "<p class='licence'>The checkpoints have licences of their own: H3's limits the territory, "
    "LTX-2.5's the annual revenue. Read them before you use or publish what they make.</p>"
)


def part(name: str, template: str, value: Any = None, *, scripts: Iterable[str] = ()) -> gr.HTML:
    """One part of a panel: `template` is constant text, web/<name>.js fills it.

    scripts: files of web/ that run before it in the same function, without their ".js".
    """
    code = "\n".join((WEB / f"{s}.js").read_text(encoding="utf-8") for s in (*scripts, name))
    return gr.HTML(
        value, html_template=template, js_on_load=code, elem_id=f"part-{name}", padding=False
    )


def field(label: str, control: str, cls: str = "") -> str:
    """A labelled control of a form; constant text, no value of a user."""
    return f"<label class='f {cls}'><span>{label}</span>{control}</label>"


def header(tabs: Iterable[tuple[str, str]], first: dict[str, Any]) -> gr.HTML:
    """Page name, engine state, tabs from (name, title), theme, who is signed in.

    first: `panels.first.first_draft`, of a page that remembers no draft.
    """
    names = [{"name": name, "title": title} for name, title in tabs]
    return part("header", _HEADER, {"tabs": names, "first": first})


def footer() -> gr.HTML:
    """What a user must know of the checkpoints' licence."""
    return gr.HTML(_LICENCE, padding=False)
