"""The one object that panels receive: owns the engine, runs requests in turn, tells the state."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from app import preflight, runs
from app.runs import Run, State
from runtime.engine import Engine
from runtime.families import FAMILIES
from runtime.messages import (
    Event,
    Failure,
    Note,
    Plan,
    Progress,
    Ready,
    Ref2VARequest,
    Result,
    StageTime,
)

MAX_WAITING = 8
KEPT = 20  # jobs remembered here; their folders stay

EngineState = Literal["loading", "ready", "busy", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request and how far it is."""

    request: Ref2VARequest
    folder: Path
    state: State = "queued"
    stage: str = ""
    done: int = 0
    total: int = 0
    started: float = 0.0  # seconds since the epoch; 0 while it waits
    notes: tuple[Note, ...] = ()
    stages: tuple[StageTime, ...] = ()
    last: Result | Failure | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will happen to it."""
        return self.last is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state at one moment; a different version means that something changed."""

    version: int
    engine: EngineState
    loading: Progress | None
    ready: Ready | None
    reason: str  # why the engine failed, else ""
    jobs: tuple[Job, ...]  # oldest first

    @property
    def latest(self) -> Job | None:
        """The job to show: the running one, else the last that ended, else the next to run."""
        running = [job for job in self.jobs if job.state in ("running", "cancelling")]
        ended = [job for job in self.jobs if job.ended]
        return next(iter((*running, *ended[-1:], *self.jobs)), None)

    def job(self, id: str) -> Job | None:
        """The job of a request id, if it is still remembered."""
        return next((job for job in self.jobs if job.request.id == id), None)


class Session:
    """Owns one engine and a thread that feeds it; every method may be called from any thread."""

    def __init__(
        self, plan: Plan, *, root: Path = runs.FOLDER, families: Mapping[str, str] = FAMILIES
    ) -> None:
        self.plan = plan
        self.root = root
        self._engine = Engine(plan, families=families)
        self._changed = threading.Condition()
        self._snapshot = Snapshot(
            version=0, engine="loading", loading=None, ready=None, reason="", jobs=()
        )
        self._waiting: deque[str] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="session", daemon=True)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """The state now; cheap."""
        return self._snapshot

    def wait(self, version: int, timeout_seconds: float) -> Snapshot:
        """The first snapshot newer than `version`, or the present one when the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot.version > version, timeout_seconds)
            return self._snapshot

    def submit(self, request: Ref2VARequest) -> Job:
        """Checks the request and puts it in the queue; ValueError with one sentence if refused."""
        folder = self.root / request.id
        preflight.check(request, self.plan, folder)
        with self._changed:
            if self._closing:
                raise ValueError("the console is closing; start it again")
            if len(self._waiting) >= MAX_WAITING:
                raise ValueError(
                    f"{MAX_WAITING} requests are waiting already; wait for one or cancel one"
                )
            job = Job(request=request, folder=folder)
            self._waiting.append(request.id)
            self._set(jobs=(*self._snapshot.jobs, job)[-KEPT - MAX_WAITING :])
        return job

    def cancel(self, id: str) -> None:
        """Takes a waiting job out of the queue, or stops a running one at its next step."""
        with self._changed:
            job = self._snapshot.job(id)
            if job is None or job.ended:
                return
            if id in self._waiting:
                self._waiting.remove(id)
                failure = Failure(request_id=id, stage="", reason="cancelled", cancelled=True)
                self._put(replace(job, state="cancelled", last=failure))
                return
            self._put(replace(job, state="cancelling"))
        self._engine.cancel(id)  # may overtake the request itself: the rank keeps it in mind

    def close(self, *, grace_seconds: float = 10.0) -> None:
        """Cancels what runs, ends the engine and the thread; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for job in self._snapshot.jobs:
            self.cancel(job.request.id)
        self._thread.join(grace_seconds)
        if self._thread.is_alive():
            self._engine.kill()
            self._thread.join()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """The thread: it also spawns the ranks, which live as long as it does."""
        self._start()
        while (job := self._take()) is not None:
            if self._engine.alive or self._start():
                self._run(job)
            elif not self._closing:
                failure = Failure(
                    request_id=job.request.id, stage="load", reason=self._snapshot.reason
                )
                self._edit(replace(job, state="failed", last=failure))
        self._engine.close()
        self._edit(engine="closed")

    def _take(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                return None
            job = self._snapshot.job(self._waiting.popleft())
            assert job is not None, "a waiting job is always remembered"
            job = replace(job, state="running", stage="start", started=time.time())
            self._put(job)
            return job

    def _start(self) -> bool:
        self._edit(engine="loading", ready=None, loading=None, reason="")
        for event in self._engine.start():
            if isinstance(event, Progress):
                self._edit(loading=event)
            if isinstance(event, Ready):
                self._edit(engine="ready", ready=event, loading=None)
            if isinstance(event, Failure):
                self._edit(engine="failed", reason=event.reason, loading=None)
            if self._closing:
                self._engine.kill()
        return self._engine.alive

    def _run(self, job: Job) -> None:
        self._edit(engine="busy")
        try:
            run, pids = Run(job.folder, job.request, self.plan), self._engine.pids
            for event in self._engine.generate(job.request, out=job.folder):
                run.add(event)
                if isinstance(event, Result | Failure):  # the record is whole before anyone is told
                    run.finish(event, self._snapshot.ready, self._ending(event), pids=pids)
                self._fold(job.request.id, event)
        except (OSError, ValueError) as error:  # the run folder cannot be written
            failure = Failure(request_id=job.request.id, stage="record", reason=str(error))
            self._fold(job.request.id, failure)
        self._edit(engine="ready" if self._engine.alive else "failed")

    def _fold(self, id: str, event: Event) -> None:
        with self._changed:
            job = self._snapshot.job(id)
            assert job is not None, "the running job is always remembered"
            if isinstance(event, Progress):
                job = replace(job, stage=event.stage, done=event.done, total=event.total)
            if isinstance(event, Note):
                job = replace(job, notes=(*job.notes, event))
            if isinstance(event, StageTime):
                job = replace(job, stages=(*job.stages, event))
            if isinstance(event, Result):
                job = replace(job, stages=event.stages)
            if isinstance(event, Result | Failure):
                job = replace(job, state=self._ending(event), last=event)
            self._put(job)

    def _ending(self, last: Result | Failure) -> State:
        if isinstance(last, Result):
            return "done"
        if last.cancelled:
            return "cancelled"
        return "failed" if self._engine.alive else "interrupted"

    def _put(self, job: Job) -> None:
        """Replaces one job; the lock is held."""
        id = job.request.id
        self._set(jobs=tuple(job if j.request.id == id else j for j in self._snapshot.jobs))

    def _edit(self, job: Job | None = None, **changes: object) -> None:
        with self._changed:
            if job is not None:
                self._put(job)
            self._set(**changes)

    def _set(self, **changes: object) -> None:
        version = self._snapshot.version + 1
        self._snapshot = replace(self._snapshot, version=version, **changes)  # type: ignore[arg-type]
        self._changed.notify_all()
