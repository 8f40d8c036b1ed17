"""Jobs done in order in a thread of their own, while the thread that hands them over goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

Job = Callable[[], None]
_POLL_SECONDS = 0.05  # how often a waiting caller looks at its cancel check
END_SECONDS = 60.0  # a job that was told to stop may take to end


class Aside:
    """A context: `put` and `finish` raise what a job raised; leaving it ends the thread.

    A job that does not end in END_SECONDS is left behind: TimeoutError, or a note on the error that
    leaves the block. After a failure no further job runs. check_cancel is called in the caller's
    thread only, and raises to stop; the job that runs then can see `stopped` and end early.
    """

    def __init__(self, name: str, *, waiting: int, check_cancel: Callable[[], None]) -> None:
        """waiting: most jobs that wait; with the running one that is all that is kept alive."""
        self.stopped = threading.Event()
        self.busy_seconds = 0.0  # spent in jobs
        self.waited_seconds = 0.0  # spent by the caller in `put` and `finish`
        self._check_cancel = check_cancel
        self._jobs: queue.Queue[Job | None] = queue.Queue(waiting)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopped.set()  # after `finish` there is nothing left to stop
        until = time.monotonic() + END_SECONDS
        while self._thread.is_alive():
            self._offer(None)
            self._thread.join(_POLL_SECONDS)
            if time.monotonic() > until and self._thread.is_alive():
                self._leave_behind(error)
                return

    def _leave_behind(self, error: BaseException | None) -> None:
        said = (
            f"{self._thread.name}: a job that was told to stop has not ended for "
            f"{END_SECONDS:.0f} s; restart the engine"
        )
        if error is None:
            raise TimeoutError(said)
        error.add_note(said)

    def put(self, job: Job) -> None:
        """Hands over the next job; waits while too many wait."""
        start = time.perf_counter()
        self._look()
        while not self._offer(job):
            self._look()
        self.waited_seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Waits for every job."""
        start = time.perf_counter()
        while not self._offer(None):
            self._look()
        while self._thread.is_alive():
            self._look()
            self._thread.join(_POLL_SECONDS)
        self._look()
        self.waited_seconds += time.perf_counter() - start

    def _look(self) -> None:
        if self._error is not None:
            raise self._error
        self._check_cancel()

    def _offer(self, job: Job | None) -> bool:
        try:
            self._jobs.put(job, timeout=_POLL_SECONDS)
        except queue.Full:
            return False
        return True

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self.stopped.is_set():
                self._run(job)
            del job  # else what it holds lives on while the next one is awaited

    def _run(self, job: Job) -> None:
        start = time.perf_counter()
        try:
            job()
        except BaseException as error:
            self._error = error
        self.busy_seconds += time.perf_counter() - start
