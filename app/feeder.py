"""The thread that runs the jobs of the queue, one after another, on one engine or as parity."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from app.announcer import Announcer
from app.jobs import Job, JobStore, State
from app.runner import STOPPED, Runner
from runtime.messages import Plan

ParityRun = Callable[
    [Job, Path, Callable[[str, int, int], None], Callable[[], bool]], tuple[State, str]
]

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at an idle engine


class Feeder:
    """Claims and runs jobs until it is closed; it also spawns the ranks, which die with it."""

    def __init__(
        self,
        jobs: JobStore,
        root: Path,
        runner: Runner,
        announcer: Announcer,
        parity: ParityRun,
        *,
        plan: Plan,
        moved: Callable[[], None],
    ) -> None:
        """plan: loaded at once unless a job waits. moved: the queue is another one now."""
        self._jobs = jobs
        self._root = root
        self._runner = runner
        self._announcer = announcer
        self._parity = parity
        self._plan = plan
        self._moved = moved
        self._wake = threading.Condition()
        self._poked = self._unloading = self._closing = False
        self._thread = threading.Thread(target=self._serve, name="feeder", daemon=True)
        self._thread.start()

    @property
    def closing(self) -> bool:
        """No job is begun any more."""
        return self._closing

    def poke(self) -> None:
        """There may be something to begin."""
        with self._wake:
            self._poked = True
            self._wake.notify()

    def unload(self) -> None:
        """Ends the engine, between two jobs."""
        with self._wake:
            self._unloading = True
            self._wake.notify()

    def close(self, grace_seconds: float) -> None:
        """Interrupts what runs and ends the engine; may be called again."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._runner.stop()
        self._thread.join(grace_seconds)
        if self._thread.is_alive():
            self._runner.kill()
            self._thread.join()

    def _serve(self) -> None:
        if self._jobs.paused or not self._jobs.waiting():
            self._runner.load(self._plan)
        self.poke()
        while (job := self._take()) is not None:
            self._moved()
            self._announcer.job(job.id)
            try:
                if job.kind == "parity":
                    self._run_parity(job)
                else:
                    self._runner.run(job)
            except Exception as error:  # a fault of ours in one job may not end the queue
                _LOG.exception("job %s", job.id)
                words = next(iter(str(error).splitlines()), "")
                reason = f"the console failed: {type(error).__name__}: {words}"
                self._runner.settle(job.id, state="failed", reason=reason, ended=time.time())
            self._moved()
            self.poke()
        self._runner.unload("closed")

    def _take(self) -> Job | None:
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._poked or self._unloading or self._closing, _LOOK_SECONDS
                )
                poked, unloading = self._poked, self._unloading
                self._poked = self._unloading = False
                if self._closing:
                    return None
            if unloading:
                self._runner.unload()
            if poked and (job := self._claim()) is not None:
                return job
            self._runner.look()

    def _claim(self) -> Job | None:
        """The next job; while the disk takes nothing none is begun, and the engine says why."""
        try:
            return self._jobs.claim()
        except OSError as error:
            self._runner.complain(str(error))
            time.sleep(_LOOK_SECONDS)
            self.poke()
            return None

    def _run_parity(self, job: Job) -> None:
        self._runner.unload()  # its memory is needed; nothing runs beside a job

        def progress(stage: str, done: int, total: int) -> None:
            self._jobs.progress(job.id, stage, done, total)
            self._announcer.job(job.id)

        def cancelled() -> bool:
            return self._closing or self._jobs.need(job.id).state == "cancelling"

        state, reason = self._parity(job, self._root / job.id, progress, cancelled)
        if self._closing and state == "cancelled":
            state, reason = "interrupted", STOPPED
        now = self._jobs.need(job.id)
        ended = {"stage": now.stage, "done": now.done, "total": now.total, "ended": time.time()}
        self._runner.settle(job.id, state=state, reason=reason, **ended)
