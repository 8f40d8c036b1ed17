"""The queue's master: checks and enqueues jobs, changes them, tells how they are."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import licences, media, preflight, recovery, runs
from app.announcer import Announcer, Publisher, Shape
from app.errors import TooMany, WrongState
from app.feeder import Feeder, ParityRun
from app.forecast import Forecast, forecast, forecasts
from app.history import History, Typical
from app.jobs import Job, JobStore
from app.live import EngineStatus, Live
from app.runner import Marks, Runner
from runtime.families import FAMILIES
from runtime.messages import Plan, Request

MOST_OF_ONE, MOST_OF_ALL = 100, 500  # jobs that wait


class Session:
    """Owns one engine and the feeder of it; every method may be called from any thread."""

    def __init__(
        self,
        jobs: JobStore,
        hub: Publisher,
        root: Path,
        plan: Plan,
        *,
        shape: Shape,
        marks: Marks,
        parity: ParityRun,
        owner: str,
        families: Mapping[str, str] = FAMILIES,
    ) -> None:
        """Settles what a killed console left, then loads `plan` unless a job waits already.

        shape: a job as its owner's pages get it. owner: of runs made by `launch.py generate`.
        """
        self.plan = plan
        self._jobs = jobs
        self._hub = hub
        self._root = root
        self._history = History()
        recovery.recover(jobs, root)
        recovery.adopt(jobs, root, owner)
        for job, times in jobs.times():
            if job.request is not None:
                self._history.add(job.request, job.plan, times)
        self._announcer = Announcer(jobs, hub, shape)
        self._runner = Runner(
            jobs, hub, root, self._announcer, self._history, families=families, marks=marks
        )
        self._adding = threading.Lock()
        self._feeder = Feeder(
            jobs, root, self._runner, self._announcer, parity, plan=plan, moved=self._tell_queue
        )

    # ---- what runs and waits

    def live(self, id: str) -> Live | None:
        """The running job so far; None for every other one."""
        return self._runner.live(id)

    def engine_state(self) -> EngineStatus:
        """What the engine does now."""
        return self._runner.status

    def eta(self, job: Job) -> float | None:
        """Seconds that an open job needs (still); None without a done run of its class."""
        return self.forecast(job).eta

    def forecast(self, job: Job) -> Forecast:
        """What is left of an open job, and what it waits for."""
        return forecast(job, self._jobs, self._history, self._runner)

    def forecasts(self) -> dict[str, Forecast]:
        """For every open job."""
        return forecasts(self._jobs, self._history, self._runner)

    def typical(self, request: Request, plan: Plan) -> Typical | None:
        """What our done runs of this shape and plan took; None without one."""
        return self._history.typical(request, plan)

    # ---- putting in

    def enqueue(
        self,
        owner: str,
        request: Request,
        plans: tuple[Plan, ...],
        *,
        keep_latents: bool = True,
    ) -> tuple[Job, ...]:
        """One job per plan, next to each other; ids are new. ValueError with one sentence."""
        for plan in plans:
            self._check(request, plan)
        group = runs.new_id() if len(plans) > 1 else ""
        jobs = tuple(_new(owner, request, plan, group, keep_latents) for plan in plans)
        return self._add(owner, *jobs)

    def enqueue_parity(self, owner: str, plan: Plan, task: dict[str, Any]) -> Job:
        """A parity job; goldens name their own checkpoints: those of the plan may be missing."""
        id, now = runs.new_id(), time.time()
        job = Job(id=id, kind="parity", owner=owner, plan=plan, task=task, created=now)
        return self._add(owner, job)[0]

    def retry(self, id: str) -> Job:
        """A new run of a job that failed, was cancelled or interrupted."""
        job = self._jobs.need(id)
        if job.state not in ("failed", "cancelled", "interrupted"):
            raise WrongState(f"job {id} is {job.state}; duplicate it to run it once more")
        return self._again(job, group=job.group, attempt=job.attempt + 1)

    def duplicate(self, id: str) -> Job:
        """A new job with the same request and plan, at the end of the queue."""
        return self._again(self._jobs.need(id), group="", attempt=1)

    # ---- changing

    def edit(self, id: str, *, request: Request | None = None, plan: Plan | None = None) -> Job:
        """Another request or plan for a job that waits."""
        job = self._jobs.need(id)
        if job.request is not None:
            self._check(request or job.request, plan or job.plan)
        elif request is not None:
            raise ValueError(f"job {id} is a parity job; it has no request to edit")
        request = request and replace(request, id=id)
        edited = self._jobs.edit(id, request=request, plan=plan)
        self._announcer.job(id)
        self._tell_queue()
        return edited

    def cancel(self, id: str) -> Job:
        """Takes a waiting job out of the queue, or stops a running one at its next step."""
        waited = {"ended": time.time(), "reason": "cancelled before it began"}
        if self._jobs.update(id, only=("queued",), state="cancelled", **waited):
            self._tell_queue()
        elif self._jobs.update(id, only=("running",), state="cancelling"):
            self._runner.cancel(id)
        elif (job := self._jobs.need(id)).state != "cancelling":
            raise WrongState(f"job {id} is {job.state} already")
        self._announcer.job(id)
        return self._jobs.need(id)

    def move(self, id: str, before: str | None, *, owner: str | None = None) -> None:
        """Puts a waiting job before another, or last; `owner`: among this user's jobs only."""
        self._jobs.move(id, before, owner=owner)
        self._tell_queue()

    def pause(self, paused: bool) -> None:
        """Holds the queue after the running job, or lets it go on; survives a restart."""
        self._jobs.paused = paused
        self._tell_queue()
        self._feeder.poke()

    def remove(self, id: str) -> None:
        """Deletes a job that does not run, with its folder."""
        self._jobs.update(id, only=("queued",), state="cancelled", ended=time.time())
        job = self._jobs.need(id)
        if not job.over:
            raise WrongState(f"job {id} is {job.state}; cancel it before it is deleted")
        folder = self._root / id
        if folder.is_symlink():  # somebody keeps the run elsewhere: that is not ours
            folder.unlink()
        elif folder.is_dir():  # before the row: a folder without one would be adopted again
            shutil.rmtree(folder)
        self._jobs.remove(id)
        self._tell_queue()

    def unload(self) -> None:
        """Ends the engine when nothing runs, which frees its memory; the next job starts it."""
        running = [job for job in self._jobs.queue() if job.state != "queued"]
        if running:
            raise WrongState(f"job {running[0].id} is running; wait for it or cancel it first")
        self._feeder.unload()

    def close(self, *, grace_seconds: float = 10.0) -> None:
        """Interrupts what runs and ends the engine; what waits goes on at the next start."""
        self._feeder.close(grace_seconds)
        self._announcer.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _check(self, request: Request, plan: Plan) -> None:
        """What can be known to be wrong without opening media, which no console process does."""
        preflight.check_length(request)
        preflight.check(request, plan, self._root, probe=media.facts)
        licences.check(plan, self._root)

    def _add(self, owner: str, *jobs: Job) -> tuple[Job, ...]:
        with self._adding:  # two clients may not both take the last place
            if self._feeder.closing:
                raise ValueError("the console is closing; start it again")
            for waiting, most, whose in (
                (self._jobs.waiting(owner), MOST_OF_ONE, "of your jobs"),
                (self._jobs.waiting(), MOST_OF_ALL, "jobs"),
            ):
                if waiting + len(jobs) > most:
                    raise TooMany(
                        f"{waiting} {whose} wait already and at most {most} may; wait for some "
                        "or cancel some"
                    )
            added = self._jobs.add(*jobs)
        self._tell_queue()
        self._feeder.poke()
        return added

    def _again(self, job: Job, *, group: str, attempt: int) -> Job:
        id = runs.new_id()
        request = None if job.request is None else replace(job.request, id=id)
        if request is not None:
            self._check(request, job.plan)
        again = Job(
            id=id,
            kind=job.kind,
            owner=job.owner,
            plan=job.plan,
            request=request,
            task=job.task,
            group=group,
            parent=job.id,
            keep_latents=job.keep_latents,
            created=time.time(),
            attempt=attempt,
        )
        return self._add(job.owner, again)[0]

    def _tell_queue(self) -> None:
        self._hub.publish("queue", {"paused": self._jobs.paused})


def _new(owner: str, request: Request, plan: Plan, group: str, keep_latents: bool) -> Job:
    id = runs.new_id()
    return Job(
        id=id,
        kind="generate",
        owner=owner,
        plan=plan,
        request=replace(request, id=id),
        task={},
        group=group,
        keep_latents=keep_latents,
        created=time.time(),
    )
