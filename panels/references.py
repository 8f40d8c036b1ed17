"""The ordered references of the Generate panel: uploader, thumbnails, what is done to each."""

from __future__ import annotations

import gradio as gr

from panels.widgets import part
from runtime.messages import MAX_AUDIOS, MAX_IMAGES, MAX_VIDEOS

_TEMPLATE = (
    "<section class='refs-box' aria-label='References'><div class='refs-head'>"
    "<h2 class='sub'>References</h2><span class='refs-count'></span>"
    "<button class='quiet add' id='add' type='button'>Add files</button>"
    "<input class='pick' type='file' multiple hidden tabindex='-1' "
    "accept='image/*,video/*,audio/*,.mkv,.flac,.opus,.gif'>"
    "<input class='pick-sound' type='file' hidden tabindex='-1' "
    "accept='audio/*,video/*,.flac'></div>"
    f"<div class='refs-empty'>Drop, paste or choose up to {MAX_IMAGES} pictures, {MAX_VIDEOS} "
    f"videos and {MAX_AUDIOS} sounds. Their order gives the numbers that the prompt uses, such as "
    "&lt;Picture 1&gt;. One of our own mp4s brings back its settings.</div>"
    "<ol class='refs'></ol><ul class='loads' aria-live='polite'></ul></section>"
)


def build() -> gr.HTML:
    """The list and its uploader; they change the page's draft."""
    return part("references", _TEMPLATE, scripts=("upload",))
