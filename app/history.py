"""How long jobs take, told from our own done runs of the same shape and plan; else not at all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from app import families
from runtime.messages import Plan, Request, StageTime

LOAD, DENOISE, END_TO_END = "load", "denoise", "end to end"
AFTER = ("video VAE decode", "audio VAE decode", "mux")  # what follows the last step
OWN_PACE_FROM = 2  # steps done: the first one alone may hold warming up
KEPT = 20  # runs of one shape and plan; the newest count

Times = Mapping[str, float]  # seconds by stage, of one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """Median seconds of the parts of a run of one shape and plan."""

    before: float  # until the first step
    denoise: float
    after: float  # from the last step to the file
    load: float  # of the plan, when the engine has another one

    @property
    def run(self) -> float:
        """Seconds of a run on a loaded engine."""
        return self.before + self.denoise + self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a running job is: seconds since its request began and since this stage did.

    Of what follows the steps, AFTER, stage_seconds count from the first of it.
    """

    stage: str
    done: int
    total: int
    run_seconds: float
    stage_seconds: float
    step_seconds: float  # since the last step ended; 0 outside denoising


def times_of(stages: Iterable[StageTime], load_seconds: float) -> dict[str, float]:
    """Seconds by stage of the first rank (the slowest is not needed: ranks run in step)."""
    times = {LOAD: load_seconds}
    for stage in stages:
        if stage.rank == 0 and stage.stage in (DENOISE, END_TO_END, *AFTER):
            times[stage.stage] = times.get(stage.stage, 0.0) + stage.seconds
    return times


class History:
    """Durations by shape class and plan; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[Hashable, deque[Times]] = {}
        self._loads: dict[Plan, deque[float]] = {}

    def add(self, request: Request, plan: Plan, times: Times) -> None:
        """Takes a done run; one without a whole clock (an adopted one of old) tells nothing."""
        if END_TO_END not in times or DENOISE not in times:
            return
        with self._lock:
            self._runs.setdefault(_key(request, plan), deque(maxlen=KEPT)).append(times)
            if times.get(LOAD):
                self._loads.setdefault(plan, deque(maxlen=KEPT)).append(times[LOAD])

    def typical(self, request: Request, plan: Plan) -> Typical | None:
        """Medians of the same shape class and plan; None without such a run."""
        with self._lock:
            runs = list(self._runs.get(_key(request, plan), ()))
            loads = list(self._loads.get(plan, ()))
        if not runs:
            return None
        after = median(sum(times.get(name, 0.0) for name in AFTER) for times in runs)
        denoise = median(times[DENOISE] for times in runs)
        whole = median(times[END_TO_END] for times in runs)
        return Typical(
            before=max(0.0, whole - denoise - after),
            denoise=denoise,
            after=after,
            load=median(loads) if loads else 0.0,
        )


def remaining(typical: Typical, now: Moment) -> float:
    """Seconds that a running job still needs: its own rate for the steps, history for the rest."""
    if now.stage in AFTER:
        return max(0.0, typical.after - now.stage_seconds)
    if now.stage != DENOISE:
        left = max(0.0, typical.before - now.run_seconds)
        return left + typical.denoise + typical.after
    rate = _rate(now) if now.done else typical.denoise / max(now.total, 1)
    return _steps_left(now, rate) + typical.after


def denoise_left(now: Moment) -> float | None:
    """Seconds that the steps of a run still need by its own pace alone, told from step 2 on."""
    if now.stage != DENOISE or now.done < OWN_PACE_FROM:
        return None
    return _steps_left(now, _rate(now))


def _rate(now: Moment) -> float:
    """Seconds a step of this run took so far."""
    return (now.stage_seconds - now.step_seconds) / now.done


def _steps_left(now: Moment, rate: float) -> float:
    return max(0.0, (now.total - now.done) * rate - min(now.step_seconds, rate))


def _key(request: Request, plan: Plan) -> Hashable:
    """Runs of one key take about as long: the sizes, the steps, what is encoded, the plan."""
    return (families.of_request(request).alike(request), plan)
