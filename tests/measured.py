"""Made-up results of `launch.py sweep` and `bench`, in the form that they write."""

from __future__ import annotations

from typing import Any

from app import presets
from app.stored import plain
from app.sweep import told
from runtime.messages import LTXRequest, Ref2VARequest


def spread(median: float, n: int = 4) -> dict[str, Any]:
    return {"median": median, "min": 0.98 * median, "max": 1.05 * median, "n": n}


def summary(name: str, step: float, ranks: int, exposed: float) -> dict[str, Any]:
    """Of one layout or subject; exposed: seconds of communication that computing did not hide."""
    parts = {"attention": 0.45 * step, "GEMM": 0.45 * step, "communication": exposed}
    parts["other"] = step - sum(parts.values())
    return {
        "name": name,
        "rows": 20_094,
        "step_seconds": spread(step),
        "parts": {part: spread(seconds) for part, seconds in parts.items()},
        "stages": {},
        "rank_peak_bytes": [(40 - 3 * ranks) << 30] * ranks,
        "peak_allocated_bytes": 40 << 30,
        "gpu": {"reason": "made up"},
        "load_seconds": 9.0,
        "resolved": {"attention": f"kernel of {ranks}", "torch": "2.11.0"},
        "machine": {"cpu": "none", "torch": "2.11.0", "python": "3.12"},
        "device_name": "NVIDIA H200",
    }


def _frame() -> dict[str, Any]:
    request = Ref2VARequest(id="20261130-010203_abcdef", prompt="a secret prompt")
    return {"ok": True, "request": plain(request), "text_rows": 300, "order": "single U2 TP2"}


def sweep(when: str = "2026-11-30T09:00:00Z") -> dict[str, Any]:
    """single, U2 and a TP2 that failed."""
    single, two = summary("single", 2.2, 1, 0.0), summary("U2", 1.25, 2, 0.05)
    two["profile"] = {"seconds": {"communication": 0.19}}
    two["exposed_seconds"], two["imbalance_seconds"] = spread(0.05), spread(0.03)
    parity = {
        "video": {"equal": False, "relative_l2": 3.1e-3},
        "audio": {"equal": True, "relative_l2": 0.0},
    }
    return {
        "sweep": 1,
        "when": when,
        **_frame(),
        "ok": False,
        "plan": plain(presets.load_plan(presets.find("plans", "cpu"))),
        "weights": "full:pruned_nvfp4",
        "layouts": [
            told("single", single, single, {}),
            {**told("U2", two, single, {}), "parity": parity},
            {"layout": "TP2", "ranks": 2, "ok": False, "reason": "TP2: rank 1 ran out of memory"},
        ],
        "gpus": [
            {"gpu": 0, "ok": True, "step_seconds": spread(2.2)},
            {"gpu": 1, "ok": True, "step_seconds": spread(2.26)},
        ],
    }


def bench(when: str = "2026-11-30T08:00:00Z") -> dict[str, Any]:
    """Two plans in turns."""
    plan = plain(presets.load_plan(presets.find("plans", "cpu")))
    extra = {"subject": "plan", "weights": "", "plan": plan}
    subjects = [{**summary(name, step, 1, 0.0), **extra} for name, step in (("a", 2.0), ("b", 3.0))]
    ratio = {"step": 1.5, "rounds": spread(1.5, 2)}
    return {"bench": 1, "when": when, **_frame(), "rows": 20_094, "subjects": subjects,
            "ratio": ratio}  # fmt: skip


def ltx_bench(when: str = "2026-11-30T07:00:00Z") -> dict[str, Any]:
    """The same of LTX, whose stages are told apart."""
    told = bench(when)
    del told["rows"]
    request = LTXRequest(id="20261130-010203_abcdef", prompt="a secret prompt", frames=97)
    told["request"], told["ratio"] = plain(request), {}
    sizes = ((1, 8, 1248), (2, 3, 4992))
    told["tokens"] = [
        {"stage": n, "steps": steps, "video": video, "audio": 101, "text": 1024}
        for n, steps, video in sizes
    ]
    for one in told["subjects"]:
        step, parts = one.pop("step_seconds"), one.pop("parts")
        one["sampling"] = [{**t, "step_seconds": step, "parts": parts} for t in told["tokens"]]
        del one["rows"]
    for number, times in ((1, 1.5), (2, 1.25)):
        told["ratio"][f"stage {number}"] = {"step": times, "rounds": spread(times, 2)}
    return told
