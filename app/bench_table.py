"""The table of a benchmark for people: a column per subject, and the kernels of a profiled step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = tuple[str, ...]
_GIB = 1 << 30


def lines(subjects: Sequence[Mapping[str, Any]], ratio: Mapping[str, Any] | None) -> list[str]:
    """What was measured: medians, with the least and the most in brackets."""
    rows: list[Row] = [("packed rows S", *(f"{one['rows']:,}" for one in subjects))]
    rows += step_rows("step", subjects)
    told = table(rows, subjects, _profile)
    if ratio is not None:
        told += ["", ratio_line("a step", subjects, ratio)]
    return told


def step_rows(title: str, timed: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Seconds of a step and of its parts, a column each."""
    rows: list[Row] = [(title, *(_spread(one["step_seconds"]) for one in timed))]
    for part in _names(one["parts"] for one in timed):
        rows.append((f"  {part}", *(_spread(one["parts"].get(part)) for one in timed)))
    return rows


def table(
    steps: Sequence[Row],
    subjects: Sequence[Mapping[str, Any]],
    profile: Callable[[Mapping[str, Any]], list[str]],
) -> list[str]:
    """`steps` under the names, then all that is not a step; what ran, and what `profile` tells."""
    rows: list[Row] = [("", *(one["name"] for one in subjects)), *steps]
    for stage in _names(one["stages"] for one in subjects):
        rows.append((stage, *(_spread(one["stages"].get(stage)) for one in subjects)))
    rows.append(("outside of these", *(_spread(one["outside_seconds"]) for one in subjects)))
    rows.append(("loading", *(f"{one['load_seconds']:.1f} s" for one in subjects)))
    for name in ("allocated", "reserved"):
        peaks = (one[f"peak_{name}_bytes"] for one in subjects)
        rows.append(
            (f"peak {name}", *(f"{peak / _GIB:.2f} GiB" if peak else "-" for peak in peaks))
        )
    rows.append(("power", *(_gpu(one["gpu"], "power_watts", "W") for one in subjects)))
    rows.append(("SM clock", *(_gpu(one["gpu"], "sm_clock_mhz", "MHz") for one in subjects)))
    told = _aligned(rows)
    for one in subjects:
        told += ["", *(f"{one['name']}: {key}: {is_}" for key, is_ in one["resolved"].items())]
        told += profile(one)
    return told


def ratio_line(what: str, subjects: Sequence[Mapping[str, Any]], ratio: Mapping[str, Any]) -> str:
    """`what` of the second subject against that of the first."""
    first, second = (one["name"] for one in subjects)
    rounds = ratio["rounds"]
    return (
        f"{what} of {second} takes {ratio['step']:.3f} times as long as one of {first} "
        f"({rounds['min']:.3f} to {rounds['max']:.3f} in {rounds['n']} rounds)"
    )


def _names(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _spread(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.4f} s ({value['min']:.4f} to {value['max']:.4f})"


def _gpu(told: Mapping[str, Any], key: str, unit: str) -> str:
    if "reason" in told:
        return f"not reported: {told['reason']}"
    return f"{told[key]['median']:.0f} {unit} ({told[key]['min']:.0f} to {told[key]['max']:.0f})"


def _profile(subject: Mapping[str, Any]) -> list[str]:
    return profile_lines(f"{subject['name']}: one profiled step", subject.get("profile"))


def profile_lines(title: str, profile: Mapping[str, Any] | None) -> list[str]:
    """Where the GPU's time of a profiled step went; nothing where none was profiled."""
    if profile is None:
        return []
    step = profile["step_seconds"]
    told = [f"{title} of {step:.4f} s"]
    for name, seconds in profile["seconds"].items():
        kernels = profile["kernels"].get(name, 0)
        top = "; ".join(kernel for kernel, _ in profile["top"].get(name, ())[:2])
        share = 100 * seconds / step
        told.append(f"  {name:<13} {seconds:8.4f} s {share:5.1f} % {kernels:6} kernels  {top}")
    return told


def _aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
