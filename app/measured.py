"""What a request was counted as, before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from app.estimate import ReferencePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Rows of a request; of H3 as runtime/h3/measure.py counts them.

    problem: why nothing is known. refused: why the run would be, of the request alone.
    """

    references: tuple[ReferencePlan, ...] = ()
    sound_latents: int = 0  # of the longest reference sound
    text: int = 0
    total: int = 0
    negative: int = 0
    most_vision: int = 0
    problem: str = ""
    refused: str = ""
