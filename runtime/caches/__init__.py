"""Step caches by name: lossy, off by default; a new one is one file with `CACHE` and one word."""

from __future__ import annotations

import importlib

from runtime.caches.base import (
    COMPUTED,
    Evaluation,
    Limits,
    StepCache,
    StepOutcome,
    StepState,
    Streams,
)
from runtime.quoted import quoted

__all__ = [
    "CACHES",
    "COMPUTED",
    "Evaluation",
    "Limits",
    "StepCache",
    "StepOutcome",
    "StepState",
    "Streams",
    "limits_of",
    "step_cache",
]

CACHES = ("easy_cache", "h3_cache", "spectrum")


def step_cache(name: str) -> StepCache:
    """The cache of that name; ValueError lists the known ones."""
    if name not in CACHES:
        raise ValueError(f"cache must be off or one of {', '.join(CACHES)}, got {quoted(name)}")
    found: StepCache = importlib.import_module(f"runtime.caches.{name}").CACHE
    return found


def limits_of(name: str, *, threshold: float, warmup: int, max_run: int) -> Limits:
    """The limits of a plan; where it says 0 the method's own hold."""
    own = step_cache(name).own
    return Limits(
        threshold=threshold or own.threshold,
        warmup=warmup or own.warmup,
        max_run=max_run or own.max_run,
    )
