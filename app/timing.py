"""The stage table, with the column names vLLM-Omni uses; what was not measured says so."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from runtime.messages import Progress, StageTime

NOT_MEASURED = "not measured"
_WHOLE = ("text encode", "reference encode")
_SOME = ("latent upsample",)  # a row only where there was one: of LTX
_AFTER = ("video VAE decode", "audio VAE decode", "mux")
KERNELS = ("attention", "GEMM", "communication", "other")  # the parts of a step
ALL_COMMUNICATION = "all communication"  # of several ranks: beside the parts, waited for or not

Row = tuple[str, str]
Column = tuple[str, float | None]


def stage_rows(
    stages: Iterable[StageTime], *, load_seconds: float | None, peak_memory_bytes: int
) -> tuple[Row, ...]:
    """(name, text) rows; of several ranks the slowest counts, as the others wait for it."""
    rows = [(name, _seconds(value)) for name, value in columns(stages, load_seconds=load_seconds)]
    memory = f"{peak_memory_bytes / 2**30:.2f} GiB" if peak_memory_bytes else NOT_MEASURED
    return (*rows, ("peak memory", memory))


def columns(stages: Iterable[StageTime], *, load_seconds: float | None) -> tuple[Column, ...]:
    """The standard columns in seconds, None for what was not measured; "load" comes first."""
    seen = tuple(stages)
    found: list[Column] = [("load", load_seconds)]
    found += [(name, _total(seen, name)) for name in _WHOLE]
    found += [("denoise", _total(seen, "denoise")), ("per step", _per_step(seen, "denoise"))]
    found += [(f"per step: {name}", _per_step(seen, name)) for name in KERNELS]
    found += [(name, _total(seen, name)) for name in _SOME if any(s.stage == name for s in seen)]
    if (exchanged := _per_step(seen, ALL_COMMUNICATION)) is not None:
        found.append((f"per step: {ALL_COMMUNICATION}", exchanged))
    found += [(name, _total(seen, name)) for name in _AFTER]
    return (*found, ("E2E", _total(seen, "end to end")))


def amount(event: Progress) -> str:
    """How far: "3/12" of steps and tiles, per cent of what is counted in bytes."""
    if event.total >= 100_000:
        return f"{100 * event.done // event.total} %"
    return f"{event.done}/{event.total}"


def table(rows: Iterable[Row]) -> str:
    """The rows as text in two columns."""
    pairs = tuple(rows)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {text:>14}" for name, text in pairs)


def seconds_by_stage(stages: Iterable[StageTime]) -> dict[str, float]:
    """Total seconds of every stage that was measured, for machines."""
    seen = tuple(stages)
    return {name: _total(seen, name) or 0.0 for name in dict.fromkeys(s.stage for s in seen)}


def _total(stages: tuple[StageTime, ...], name: str) -> float | None:
    by_rank: dict[int, float] = {}
    for stage in stages:
        if stage.stage == name:
            by_rank[stage.rank] = by_rank.get(stage.rank, 0.0) + stage.seconds
    return max(by_rank.values()) if by_rank else None


def _per_step(stages: tuple[StageTime, ...], name: str) -> float | None:
    """Median over the steps, of which the first also warms up, of what the slowest rank took."""
    by_rank: dict[tuple[int, int], float] = {}
    for stage in stages:
        if stage.stage == name and stage.step >= 0:
            key = (stage.step, stage.rank)
            by_rank[key] = by_rank.get(key, 0.0) + stage.seconds
    steps: dict[int, float] = {}
    for (step, _), seconds in by_rank.items():
        steps[step] = max(steps.get(step, 0.0), seconds)
    return statistics.median(steps.values()) if steps else None


def _seconds(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1000:.2f} ms"
