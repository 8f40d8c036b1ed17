"""Feeds one engine: loads the plan a job needs, runs it, keeps what pages ask meanwhile."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from app import licences, records
from app.announcer import Announcer, Publisher
from app.history import History, times_of
from app.jobs import Job, JobStore, State
from app.live import EngineState, EngineStatus, Live, engine_json
from app.recording import Recording
from app.runs import Run
from runtime.engine import Engine
from runtime.media.files import DiskFullError
from runtime.messages import Event, Failure, Plan, Preview, Progress, Ready, Result

_PUBLISH_SECONDS = 0.1  # between two progress events of a load
STOPPED = "the console was stopped while this job ran; retry it"


class Marks(Protocol):
    """The telemetry, as far as it is needed here."""

    def mark(self, text: str, kind: str, id: str) -> None:
        """Something begins now."""

    def recording(self, path: Path, *, fast: bool) -> AbstractContextManager[Recording]:
        """Keeps the samples of the block as they come, ten a second if `fast`."""


class Runner:
    """One engine; `load`, `unload` and `run` belong to one thread, the rest to any."""

    def __init__(
        self,
        jobs: JobStore,
        hub: Publisher,
        root: Path,
        announcer: Announcer,
        history: History,
        *,
        families: Mapping[str, str],
        marks: Marks,
    ) -> None:
        self._jobs = jobs
        self._hub = hub
        self._root = root
        self._announcer = announcer
        self._history = history
        self._families = families
        self._marks = marks
        self._lock = threading.Lock()  # which job the engine loads for
        self._loading_for = ""
        self._engine: Engine | None = None
        self._status = EngineStatus()
        self._live: Live | None = None
        self._load_seconds = 0.0
        self._published = 0.0
        self._stopping = threading.Event()

    @property
    def status(self) -> EngineStatus:
        """What the engine does now."""
        return self._status

    def live(self, id: str) -> Live | None:
        """The running job; None for every other one."""
        live = self._live
        return live if live is not None and live.id == id else None

    def cancel(self, id: str) -> None:
        """Stops the running job at its next step, or the load that it waits for at once."""
        with self._lock:
            if self._engine is None:
                return
            if self._loading_for == id:
                self._engine.kill()
            else:
                self._engine.cancel(id)  # may overtake the request: the rank keeps it in mind

    def stop(self) -> None:
        """The console closes: what runs is interrupted, what loads is killed."""
        self._stopping.set()
        live = self._live
        if live is not None:
            self.cancel(live.id)
        elif self._status.state == "loading":
            self.kill()

    def kill(self) -> None:
        """Ends the ranks at once."""
        with self._lock:
            if self._engine is not None:
                self._engine.kill()

    def load(self, plan: Plan, job: Job | None = None) -> bool:
        """An engine with this plan, for a job; the reason why there is none is in `status`."""
        try:
            licences.check(plan, self._root)
        except (ValueError, OSError) as error:
            self.unload()
            self._tell(EngineStatus(state="failed", plan=plan, reason=str(error)))
            return False
        if self._engine is not None:
            self._engine.close()
        engine = Engine(plan, families=self._families)
        with self._lock:
            self._engine = engine
        self._tell(EngineStatus(state="loading", plan=plan))
        try:
            self._follow(engine, job)
        except OSError as error:  # no process could be made, or the store not be asked
            engine.kill()
            engine.close()
            reason = f"the engine cannot be started: {error}"
            self._tell(EngineStatus(state="failed", plan=plan, reason=reason))
        return engine.alive

    def _follow(self, engine: Engine, job: Job | None) -> None:
        began, plan = time.monotonic(), engine.plan
        for event in engine.start():
            if isinstance(event, Progress):
                told = {"stage": event.stage, "done": event.done, "total": event.total}
                self._tell(replace(self._status, **told))  # type: ignore[arg-type]
                if self._unwanted(job):  # since the engine before was being ended: not heard then
                    engine.kill()
            elif isinstance(event, Ready):
                self._load_seconds = time.monotonic() - began
                self._tell(EngineStatus(state="ready", plan=plan, ready=event))
            elif isinstance(event, Failure):
                self._tell(EngineStatus(state="failed", plan=plan, reason=event.reason))

    def unload(self, state: EngineState = "unloaded") -> None:
        """Ends the engine, which frees the memory of its devices."""
        if self._engine is not None:
            self._engine.close()
            with self._lock:
                self._engine = None
        self._tell(EngineStatus(state=state))

    def look(self) -> None:
        """Notices an engine that died while nothing ran."""
        if self._status.state == "ready" and self._engine is not None and not self._engine.alive:
            reason = "the engine died while nothing ran; it is started again for the next job"
            self._tell(replace(self._status, state="failed", reason=reason, ready=None))

    def complain(self, reason: str) -> None:
        """Shows what hinders the queue where pages look for it."""
        self._tell(replace(self._status, reason=reason))

    def run(self, job: Job) -> None:
        """Runs a claimed "generate" job until its folder and the store say how it ended."""
        assert job.request is not None, "only generate jobs are run here"
        self._live = Live(id=job.id)
        last: Result | Failure
        try:
            record = Run(self._root / job.id, job.request, job.plan)
            telemetry = record.folder / records.TELEMETRY
            with self._marks.recording(telemetry, fast=bool(job.group)) as kept:
                last = self._load_for(job) or self._generate(job, record)
            state, reason = self._ending(job, last)
            engine = self._engine
            record.finish(
                last,
                self._status.ready,
                state,
                pids=engine.pids if engine is not None else (),
                keep_latents=job.keep_latents,
            )
            reason = reason or kept.trouble
        except (OSError, ValueError) as error:  # the run folder cannot be written
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            reason = str(DiskFullError(self._root / job.id) if full else error)
            last = Failure(request_id=job.id, stage="record", reason=reason)
            state = "failed"
        self._settle(job, state, reason, last)

    def settle(self, id: str, **changes: Any) -> None:
        """Stores how a job ended; while the disk takes nothing it waits and says so."""
        while True:
            try:
                self._jobs.update(id, **changes)
                break
            except OSError as error:
                self.complain(str(error))
                if self._stopping.wait(1.0):
                    return  # the next start finds it in the run folder
        self._live = None
        self._announcer.job(id)

    # ---- one job

    def _load_for(self, job: Job) -> Failure | None:
        """Makes the engine one of the job's plan; a Failure if it cannot be or was cancelled."""
        engine = self._engine
        if engine is None or not engine.alive or engine.plan != job.plan:
            with self._lock:
                self._loading_for = job.id
            try:
                alive = self.load(job.plan, job)
            finally:
                with self._lock:
                    self._loading_for = ""
            if not alive and not self._unwanted(job):
                return Failure(request_id=job.id, stage="load", reason=self._status.reason)
            if not alive:  # killed because of it, which is no failure to show
                self.unload()
        if self._unwanted(job):
            return Failure(request_id=job.id, stage="load", reason="cancelled", cancelled=True)
        return None

    def _unwanted(self, job: Job | None) -> bool:
        if self._stopping.is_set():
            return True
        return job is not None and self._jobs.need(job.id).state == "cancelling"

    def _generate(self, job: Job, record: Run) -> Result | Failure:
        engine, ready = self._engine, self._status.ready
        assert engine is not None and job.request is not None and ready is not None
        began = time.time()
        self._tell(replace(self._status, state="busy", reason=""))
        self._live = Live(id=job.id, stage="start", began=began, stage_began=began)
        self._marks.mark(f"run on {job.plan.name}", "run", job.id)
        last: Result | Failure | None = None
        try:
            record.add(ready)
            for event in engine.generate(job.request, out=record.folder):
                record.add(event)
                self._fold(job, event)
                if isinstance(event, Result | Failure):
                    last = event
        finally:
            self._marks.mark("run ends", "run", job.id)
            reason = last.reason if isinstance(last, Failure) else ""
            state: EngineState = "ready" if engine.alive else "failed"
            self._tell(replace(self._status, state=state, reason="" if engine.alive else reason))
        assert last is not None, "the last event of an engine is Result or Failure"
        return last

    def _fold(self, job: Job, event: Event) -> None:
        live = self._live
        assert live is not None, "a job is running"
        self._live = live.after(event, time.time())
        if isinstance(event, Progress):
            self._jobs.progress(job.id, event.stage, event.done, event.total)
            if event.stage != live.stage:
                self._marks.mark(event.stage, "stage", job.id)
        elif isinstance(event, Preview):
            url = f"/api/v1/runs/{job.id}/preview?step={event.step}"
            told = {"id": job.id, "step": event.step, "url": url}
            self._hub.publish("preview", told, owner=job.owner)
        self._announcer.job(job.id)

    def _ending(self, job: Job, last: Result | Failure) -> tuple[State, str]:
        if isinstance(last, Result):
            return "done", ""
        if self._stopping.is_set():  # told to stop, or killed because it did not
            return "interrupted", STOPPED
        if last.cancelled:
            return "cancelled", ""
        died = last.stage != "load" and (self._engine is None or not self._engine.alive)
        return "interrupted" if died else "failed", last.reason

    def _settle(self, job: Job, state: State, reason: str, last: Result | Failure) -> None:
        live = self._live
        assert live is not None and job.request is not None, "a job is running"
        changes: dict[str, Any] = {"state": state, "reason": reason, "ended": time.time()}
        changes |= {"stage": live.stage, "done": live.done, "total": live.total}
        if isinstance(last, Result):
            times = times_of(last.stages, self._load_seconds)
            self._history.add(job.request, job.plan, times)
            changes |= {"stage": "", "times": times}
        self.settle(job.id, **changes)

    # ---- telling

    def _tell(self, status: EngineStatus) -> None:
        moved_on = status.state != self._status.state or status.reason != self._status.reason
        self._status = status
        now = time.monotonic()
        if moved_on or now - self._published >= _PUBLISH_SECONDS:
            self._published = now
            self._hub.publish("engine", engine_json(status))
