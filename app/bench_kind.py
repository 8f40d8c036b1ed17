"""What `launch.py bench` asks of a model family: one of these each, in bench_h3 and bench_ltx."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app import bench
from runtime.messages import Plan, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Of one family.

    check: ValueError for options that do not fit together. request, text_rows: of the options; 0
    text rows are a whole request. setup: the family's own entries of a subject's setup. ready:
    ValueError where the plan's own weights may not run. notes: what the options imply.
    peer_weights: format of a peer's. words, same_size: as bench.measure takes them. size, summary,
    ratios: entries of the result. lines: its table.
    """

    check: Callable[[Namespace], None]
    request: Callable[[Namespace], Request]
    text_rows: Callable[[Namespace], int]
    setup: Callable[[Namespace], dict[str, Any]]
    ready: Callable[[Plan], None] = lambda plan: None
    notes: Callable[[Namespace], Sequence[str]] = lambda args: ()
    peer_weights: str
    words: Callable[[bench.Told], str]
    same_size: Callable[[Sequence[bench.Subject], Sequence[bench.Told]], None]
    size: Callable[[Any], dict[str, Any]]
    summary: Callable[[bench.Measured], dict[str, Any]]
    ratios: Callable[[bench.Measured, bench.Measured], dict[str, Any]]
    lines: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any] | None], list[str]]
