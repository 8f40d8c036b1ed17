"""When the jobs of the queue will be done, as far as our own history tells."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app import families
from app.history import History, denoise_left, remaining
from app.jobs import Job, JobStore
from app.runner import Runner
from runtime.messages import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds that a job needs (still), and that it waits before; None: no history tells it.

    denoise: what the steps of the running job still need by its own pace, where eta is not known.
    """

    eta: float | None = None
    wait: float | None = None
    denoise: float | None = None


def forecast(job: Job, jobs: JobStore, history: History, runner: Runner) -> Forecast:
    """Of one job; of a running one without a look at the queue."""
    if job.over:
        return Forecast()
    if job.state != "queued":
        return _running(job, None, history, runner)
    return forecasts(jobs, history, runner).get(job.id, Forecast())


def forecasts(jobs: JobStore, history: History, runner: Runner) -> dict[str, Forecast]:
    """Of every open job, by id."""
    status = runner.status
    loaded = status.plan if status.state in ("loading", "ready", "busy") else None
    ahead: float | None = None if jobs.paused else 0.0
    told = {}
    for job in jobs.queue():
        if job.state != "queued":  # it runs, paused or not
            told[job.id] = _running(job, loaded, history, runner)
            ahead = None if ahead is None else told[job.id].eta
        else:
            eta = _eta(job, loaded, history, runner)
            told[job.id] = Forecast(eta=eta, wait=ahead)
            ahead = None if ahead is None or eta is None else ahead + eta
        loaded = job.plan if job.kind == "generate" else None
    return told


def _running(job: Job, loaded: Plan | None, history: History, runner: Runner) -> Forecast:
    eta, live = _eta(job, loaded, history, runner), runner.live(job.id)
    if eta is not None or live is None or not _even(job):
        return Forecast(eta=eta, wait=0.0)
    return Forecast(wait=0.0, denoise=denoise_left(live.moment(time.time())))


def _eta(job: Job, loaded: Plan | None, history: History, runner: Runner) -> float | None:
    typical = job.request and history.typical(job.request, job.plan)
    if not typical:
        return None
    live, now = runner.live(job.id), time.time()
    if live is None:
        return typical.run + (typical.load if loaded != job.plan else 0.0)
    if not live.began:  # the engine loads
        return max(0.0, typical.load - (now - job.started)) + typical.run
    if not _even(job):
        return max(0.0, typical.run - live.moment(now).run_seconds)
    return remaining(typical, live.moment(now))


def _even(job: Job) -> bool:
    """Its steps tell of one another."""
    return job.request is None or families.of_request(job.request).even
