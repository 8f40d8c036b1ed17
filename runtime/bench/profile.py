"""Where the GPU's time of one step goes, kernel by kernel: torch.profiler's trace, by class."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.bench.base import Turn

# The first class of which a word stands in the kernel's lower-case name; the order matters: a copy
# is an elementwise kernel to PyTorch, and cuDNN's attention is a GEMM to nobody.
CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("communication", ("nccl",)),  # it includes waiting for the other ranks
    (
        "attention",
        ("flash", "fmha", "sdpa", "attn", "attention", "qk_int", "sage", "mha", "sol_"),
    ),
    (
        "quantisation",
        ("quant", "amax", "scale_rows", "to_fp8", "fp8_rows", "hadamard", "transposepadpermute"),
    ),
    (
        "GEMM",
        ("gemm", "nvjet", "cutlass", "cublas", "matmul", "xmma", "splitk", "_mm_", "gemv", "dot_"),
    ),
    (
        "copy",
        ("memcpy", "memset", "direct_copy", "catarray", "copy_kernel", "_copy_runs", "transpose"),
    ),
    (
        "elementwise",
        (
            *("elementwise", "norm", "swiglu", "silu", "gated", "rope", "reduce", "index"),
            *("fill", "scatter", "gather", "arange", "softmax", "addcmul", "rms", "where"),
        ),
    ),
)
UNCLASSIFIED = "unclassified"
IDLE = "idle"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_TOP = 4  # kernels named per class
_NAME = 110  # characters of a kernel's name

Event = Mapping[str, Any]


def profiled(device: torch.device, turn: Callable[[], Turn]) -> tuple[Turn, Sequence[Event]]:
    """What the turn returned, and the events of its trace; ValueError without a GPU."""
    if device.type != "cuda":
        raise ValueError("--profile reads the GPU's kernels; the plan's device is cpu")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        measured = turn()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return measured, json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def tell(events: Sequence[Event], range_name: str, step_seconds: float) -> dict[str, Any]:
    """Seconds by class of the kernels that were launched inside the named range.

    step_seconds: of the same step, by its GPU events. "idle" is what no kernel covers, so the
    classes and idle add up to the step where no two kernels ran at once; "overlap" is what they
    exceed it by. ValueError when the trace lacks the range or its kernels.
    """
    kernels = list(_launched_in(events, range_name))
    if not kernels:
        raise ValueError(f"the profiler saw no kernel of {range_name!r}; is CUPTI available here?")
    seconds: dict[str, float] = dict.fromkeys([name for name, _ in CLASSES], 0.0)
    seconds[UNCLASSIFIED] = 0.0
    counts: dict[str, int] = defaultdict(int)
    names: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for kernel in kernels:
        found, length = class_of(kernel), kernel["dur"] / 1e6
        seconds[found] += length
        counts[found] += 1
        names[found][kernel["name"][:_NAME]] += length
    busy = union_seconds((k["ts"], k["ts"] + k["dur"]) for k in kernels)
    return {
        "step_seconds": step_seconds,
        "seconds": {**seconds, IDLE: max(0.0, step_seconds - busy)},
        "overlap_seconds": sum(seconds.values()) - busy,
        "kernels": dict(counts),
        "top": {
            found: sorted(own.items(), key=lambda pair: -pair[1])[:_TOP]
            for found, own in names.items()
        },
    }


def class_of(kernel: Event) -> str:
    """One of CLASSES by the kernel's name, a copy by its kind, else UNCLASSIFIED."""
    if kernel["cat"] != "kernel":
        return "copy"
    name = kernel["name"].lower()
    found = (own for own, words in CLASSES if any(word in name for word in words))
    return next(found, UNCLASSIFIED)


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the spans, which are (start, end) in microseconds."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1e6


def _launched_in(events: Sequence[Event], range_name: str) -> Iterable[Event]:
    """A kernel belongs to the range in which the CPU launched it; both share a correlation."""
    ranges = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"] == range_name
    ]
    if not ranges:
        raise ValueError(f"the trace has no range {range_name!r}")
    launches = {
        e["args"]["correlation"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in e.get("args", {})
        and any(start <= e["ts"] <= end for start, end in ranges)
    }
    return (
        e
        for e in events
        if e.get("cat") in _ON_DEVICE and e.get("args", {}).get("correlation") in launches
    )
