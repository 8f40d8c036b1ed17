"""What somebody typed or sent, as a refusal names it: not a megabyte of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MOST = 80  # characters
MOST_TYPED = 200  # of what was typed: a path is told whole


def quoted(value: object) -> str:
    """repr of a value; of a long one the beginning, and how many characters it has."""
    if isinstance(value, str):
        return repr(value) if len(value) <= MOST else f"{value[:MOST]!r}{_rest(value)}"
    try:
        return cut(repr(value))
    except ValueError:  # Python shows no number of more than 4,300 digits
        return "(a number of thousands of digits)"


def cut(text: str, most: int = MOST) -> str:
    """The text as it is; of one that is longer the beginning, and how many characters it has."""
    return text if len(text) <= most else f"{text[:most]}{_rest(text)}"


def brief(sentence: str, arguments: Sequence[str]) -> str:
    """The sentence with those of a command's arguments cut that it repeats and that are long."""
    typed = {part for one in arguments for part in (one, one.partition("=")[2], *one.split(","))}
    typed |= {str(Path(text)) for text in typed}  # which has no double slash: http://
    for text in sorted(typed, key=len, reverse=True):
        if len(text) > MOST_TYPED:
            sentence = sentence.replace(text, cut(text))
    return sentence


def _rest(text: str) -> str:
    return f"... ({len(text):,} characters)"
