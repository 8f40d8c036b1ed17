"""Tells pages how jobs move: the newest state of each, at most ten times a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from app.jobs import Job, JobStore

PAUSE_SECONDS = 0.1

_LOG = logging.getLogger(__name__)

Shape = Callable[[Job], Mapping[str, Any]]


class Publisher(Protocol):
    """The hub, as far as it is needed here."""

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Sends an event to whoever listens."""


class Announcer:
    """A thread that publishes what `job` was called for; the last state is never left out."""

    def __init__(self, jobs: JobStore, hub: Publisher, shape: Shape) -> None:
        self._jobs = jobs
        self._hub = hub
        self._shape = shape
        self._changed = threading.Condition()
        self._moved: dict[str, None] = {}  # ids, in the order they moved
        self._closing = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def job(self, id: str) -> None:
        """The job has moved."""
        with self._changed:
            self._moved[id] = None
            self._changed.notify()

    def close(self) -> None:
        """Publishes what is left and ends the thread; may be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._moved or self._closing)
                moved, self._moved = list(self._moved), {}
                if not moved:
                    return
            for id in moved:
                try:
                    self._publish(id)
                except Exception:  # what cannot be told of one job may not silence the others
                    _LOG.exception("job %s", id)
            self._ended.wait(PAUSE_SECONDS)

    def _publish(self, id: str) -> None:
        job = self._jobs.get(id)
        if job is not None:
            self._hub.publish("job", dict(self._shape(job)), owner=job.owner)
