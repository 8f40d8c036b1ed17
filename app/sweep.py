"""What a sweep says of its layouts: each against the single one, in time, bytes and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import bench
from app.children import run_child
from app.timing import ALL_COMMUNICATION
from runtime.layouts import LAYOUTS, SINGLE, Layout, check_guidance, guided
from runtime.messages import Plan

_GIB = 1 << 30
_DECODE = "video VAE decode"
_COMPARE_SECONDS = 300.0


def chosen(plan: Plan, names: str, devices: int, *, cfg: float) -> list[str]:
    """The layouts of "all" or of "U2,U4", single first: all else is told against it.

    devices: GPUs, or cores of the CPU, that this machine has; "all" takes what fits on them, those
    with ranks for a negative side if the request has one, and what the plan can be with. ValueError
    for a name that does not exist, for a layout that needs more GPUs, for one whose negative side
    has nothing to do, and for one that the plan cannot be with.
    """
    if names == "all":
        return [name for name in _held(devices, cfg) if not _refusal(plan, name)]
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        ranks = Layout.parse(name).ranks
        if plan.device == "cuda" and ranks > devices:
            raise ValueError(f"layout {name} needs {ranks} GPUs, this machine has {devices}")
        check_guidance(name, cfg)
        if refusal := _refusal(plan, name):
            raise ValueError(refusal)
    return [SINGLE, *dict.fromkeys(name for name in asked if name != SINGLE)]


def left_out(plan: Plan, devices: int, *, cfg: float) -> list[str]:
    """What "all" leaves out as the plan cannot be so: a sentence for each field in the way."""
    alike: dict[str, list[str]] = {}  # by what is said before the layout is named
    for name in _held(devices, cfg):
        if refusal := _refusal(plan, name):
            alike.setdefault(refusal.partition(f"layout {name}")[0], []).append(name)
    return [
        f"all leaves out {', '.join(names)}: {_refusal(plan, names[0])}" for names in alike.values()
    ]


def _refusal(plan: Plan, name: str) -> str:
    """Why the plan cannot be with a layout; "" where it can."""
    try:
        replace(plan, layout=name)
    except ValueError as error:
        return str(error)
    return ""


def _held(devices: int, cfg: float) -> list[str]:
    """What this machine can hold and the request has work for."""
    fitting = (name for name in LAYOUTS if Layout.parse(name).ranks <= devices)
    return [n for n in fitting if guided(cfg) or Layout.parse(n).guidance == 1]


def merged(parts: Sequence[bench.Measured]) -> bench.Measured:
    """The turns of several starts of one subject; facts and warm-up of the last."""
    last = parts[-1]
    return bench.Measured(
        name=last.name,
        facts=last.facts,
        rows=last.rows,
        warm_up=last.warm_up,
        turns=tuple(turn for part in parts for turn in part.turns),
        gpu=tuple(sample for part in parts for sample in part.gpu),
        profile=last.profile,
    )


def told(
    name: str,
    summary: Mapping[str, Any],
    single: Mapping[str, Any] | None,
    latents: Mapping[str, Path],
) -> dict[str, Any]:
    """A layout's line; against single: null for single itself, or where single did not run."""
    ranks = Layout.parse(name).ranks
    step = summary["step_seconds"]["median"]
    one = None if single is None else single["step_seconds"]["median"]
    return {
        "layout": name,
        "ranks": ranks,
        "ok": True,
        "reason": "",
        "step_seconds": summary["step_seconds"],
        "speedup": None if one is None else one / step,
        "efficiency": None if one is None else one / step / ranks,
        **communication(summary),
        "expected_bytes": summary.get("expected_bytes"),
        "nvlink_bytes": _counted(summary),
        "rank_peak_bytes": summary["rank_peak_bytes"],
        "parity": _parity(latents, name),
        "summary": dict(summary),
    }


def communication(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Seconds and shares of a step: exposed, which computing did not hide, and in all.

    Exposed: of the rank that waits least, as the others wait for it too, which is the imbalance; of
    rank 0, whose imbalance is not known, in a record without the others. In all: what rank 0
    measured, else what the profiler saw of the kernels; None for neither.
    """
    step, profile = summary["step_seconds"]["median"], summary.get("profile")
    own, whole = (summary["parts"].get(name) for name in ("communication", ALL_COMMUNICATION))
    exposed, uneven = summary.get("exposed_seconds", own), summary.get("imbalance_seconds")
    waited = None if exposed is None else exposed["median"]
    seen = None if profile is None else profile["seconds"].get("communication")
    seconds = seen if whole is None else whole["median"]
    return {
        "exposed_communication_seconds": waited,
        "exposed_communication_share": None if waited is None else waited / step,
        "imbalance_seconds": None if uneven is None else uneven["median"],
        "communication_seconds": seconds,
        "communication_share": None if seconds is None else seconds / step,
    }


def _counted(summary: Mapping[str, Any]) -> list[dict[str, float]] | None:
    """Bytes of a step over NVLink, of each GPU; None where none counts, and where a turn decodes:
    its tiles travel too.
    """
    links = summary["gpu"].get("nvlink_bytes")
    if links is None or summary["stages"].get(_DECODE, {"max": 0.0})["max"] > 0:
        return None
    steps = len(summary["steps"][0])
    return [{way: count / steps for way, count in of_gpu.items()} for of_gpu in links]


def _parity(latents: Mapping[str, Path], name: str) -> dict[str, Any] | None:
    """Video and audio apart, as `runtime.parity.latents` tells them."""
    if name == SINGLE or not {name, SINGLE} <= latents.keys():
        return None
    pair = (latents[SINGLE], latents[name])
    what = f"comparing the latents of {name}"
    found: dict[str, Any] = json.loads(
        run_child(
            "runtime.parity.latents", pair, what=what, seconds=_COMPARE_SECONDS, memory_bytes=0
        )
    )
    return found


def lines(layouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for people."""
    head = ("layout", "step", "speed-up", "efficiency", "exposed", "imbalance", "all comm.")
    more = ("MB expected", "MB by NVLink", "GiB per rank", "video rel. L2", "audio rel. L2")
    rows = [(*head, *more)]
    for one in layouts:
        if not one["ok"]:
            blank = [""] * (len(rows[0]) - 2)
            rows.append((one["layout"], f"failed: {one['reason']}", *blank))
            continue
        peaks = [f"{count / _GIB:.2f}" for count in one["rank_peak_bytes"]]
        rows.append(
            (
                one["layout"],
                f"{one['step_seconds']['median']:.4f} s",
                _number(one["speedup"], "{:.3f}x"),
                _number(one["efficiency"], "{:.1%}"),
                _number(one["exposed_communication_share"], "{:.1%}"),
                _number(one["imbalance_seconds"], "{:.4f} s"),
                _number(one["communication_seconds"], "{:.4f} s"),
                *_bytes_sent(one),
                " ".join(peaks),
                *(_distance(one["parity"], stream) for stream in ("video", "audio")),
            )
        )
    fits = [row for row in rows if not row[1].startswith("failed")]
    widths = [max(len(row[place]) for row in fits) for place in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def gpu_lines(layouts: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table leaves out: each GPU alone, and every layout against each."""
    found = []
    for one in gpus:
        if not one["ok"]:
            found.append(f"single on GPU {one['gpu']} failed: {one['reason']}")
            continue
        alone = one["step_seconds"]["median"]
        ratios = [
            f"{layout['layout']} {alone / layout['step_seconds']['median']:.3f}x"
            for layout in layouts
            if layout["ok"] and one["gpu"] < layout["ranks"] and layout["layout"] != SINGLE
        ]
        said = (f"single on GPU {one['gpu']}: {alone:.4f} s", ", ".join(ratios))
        found.append("; ".join(filter(None, said)))
    return found


def _bytes_sent(one: Mapping[str, Any]) -> tuple[str, str]:
    """A rank's of a step, on the average: by the shapes, and by the counters with their ratio."""
    expected, counted = (_sent(one[name]) for name in ("expected_bytes", "nvlink_bytes"))
    if not expected:
        return "-", "-"
    own = expected / one["ranks"]
    if not counted:
        return f"{own / 1e6:.3f}", "-"
    return f"{own / 1e6:.3f}", f"{counted / one['ranks'] / 1e6:.3f} ({counted / expected:.1%})"


def _sent(of_each: Sequence[Mapping[str, float]] | None) -> float:
    """By all; 0 where it is not known."""
    return sum(of_one["sent"] for of_one in of_each or ())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _distance(parity: Mapping[str, Any] | None, stream: str) -> str:
    if parity is None:
        return "-"
    figures = parity[stream]
    return "equal" if figures["equal"] else _number(figures["relative_l2"], "{:.2e}")
