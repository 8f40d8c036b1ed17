"""What the self-test finds of one backend, and how a finding is made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.unavailable import Unavailable
from runtime.probes.base import FAR_OFF, reason_of

CPU = torch.device("cpu")
# Relative L2 on random numbers: an exact bf16 kernel lies at 2e-3 to 4e-3 (performance.md 5.1), a
# rounded sum of another order at an ulp of a few values, and a wrong kernel near 1.
EXACT, SAME_MATHS = 1e-2, 5e-2
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One backend on the tested device; deviations are relative L2, None where not measured."""

    backend: str
    field: str  # of Plan
    status: str  # pass | fail | unavailable
    reason: str = ""  # why it fails or cannot run
    route: str = ""
    exact_deviation: float | None = None  # from fp32 arithmetic on the CPU
    reference_deviation: float | None = None  # from its own arithmetic on the CPU
    limit: float = 0.0  # of what `judged_by` names
    judged_by: str = ""  # fp32 | CPU reference
    milliseconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What running a backend gave."""

    route: str
    exact_deviation: float
    reference_deviation: float | None
    milliseconds: float | None = None


def found(
    name: str, field: str, *, lossy: bool, trial: Callable[[], Trial], far_off: float = FAR_OFF
) -> Finding:
    """The finding of a trial, which may raise what it likes: Unavailable is no failure.

    far_off: what a lossy backend may be from fp32, where nothing nearer can judge it.
    """
    try:
        with torch.inference_mode():
            got = trial()
    except Unavailable as error:
        return Finding(backend=name, field=field, status="unavailable", reason=error.reason)
    except Exception as error:  # a broken kernel must not hide the others
        return Finding(backend=name, field=field, status="fail", reason=reason_of(error))
    deviation, limit, judge = _judged(got, lossy, far_off)
    ok = deviation <= limit  # not for NaN
    return Finding(
        backend=name,
        field=field,
        status="pass" if ok else "fail",
        reason="" if ok else f"{deviation:.3g} off its {judge}; the limit is {limit:g}",
        route=got.route,
        exact_deviation=got.exact_deviation,
        reference_deviation=got.reference_deviation,
        limit=limit,
        judged_by=judge,
        milliseconds=got.milliseconds,
    )


def _judged(got: Trial, lossy: bool, far_off: float) -> tuple[float, float, str]:
    """A lossy one is held against its own arithmetic, where the CPU can do it."""
    if not lossy:
        return got.exact_deviation, EXACT, "fp32"
    if got.reference_deviation is None:
        return got.exact_deviation, far_off, "fp32"
    return got.reference_deviation, SAME_MATHS, "CPU reference"


def median_milliseconds(device: torch.device, call: Callable[[], Tensor]) -> float:
    """Of some calls after one to warm up."""
    call()
    lengths = []
    for _ in range(_REPEATS):
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        lengths.append(1000 * (time.perf_counter() - began))
    return statistics.median(lengths)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
