"""Whether a prompt fits into the context of LTX, counted by the tower's own tokenizer in a child.

The tokenizer of the published tower has 30 MB: the console neither loads nor keeps it.
"""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

from app.children import run_child
from runtime.ltx.sizes import CONTEXT_ROWS
from runtime.ltx.text_folder import check_tokens, tokenizer_file
from runtime.messages import Plan

_CHILDREN = threading.BoundedSemaphore(2)  # at once, of all pages


def check(prompt: str, plan: Plan) -> None:
    """ValueError with the number of tokens for a prompt that does not fit.

    The models of the plan have been found to be right (preflight.check_models).
    """
    text = prompt.strip()
    if len(text.encode()) < CONTEXT_ROWS:  # a token of Gemma is a byte or more; BOS is one more
        return
    check_tokens(_counted(text, plan))


def check_tokenizer(plan: Plan) -> None:
    """ValueError for a tokenizer.json that is none, which no short prompt would show."""
    _counted("", plan)


def _counted(text: str, plan: Plan) -> int:
    folder, tokenizer = plan.models.text_encoder, plan.models.tokenizer
    changed = tokenizer_file(folder, tokenizer).stat().st_mtime_ns
    return _tokens(text, folder, tokenizer, changed)


@functools.lru_cache(maxsize=256)  # of counts alone: what went wrong is of its moment
def _tokens(prompt: str, folder: Path, tokenizer: Path | None, changed: int) -> int:
    del changed
    asked = {"prompt": prompt, "text_encoder": str(folder)}
    with _CHILDREN:
        counted = run_child(
            "runtime.ltx.measure",
            what="counting the tokens of the prompt",
            stdin=json.dumps(asked | {"tokenizer": tokenizer and str(tokenizer)}).encode(),
        )
    return int(counted)
