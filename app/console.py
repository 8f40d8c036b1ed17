"""The console as one object: what the routes and the panels are given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pynvml

from app import parity_runs
from app.access import LOCAL
from app.events import Hub
from app.jobs import Job, JobStore
from app.media import MediaLibrary
from app.planning import Planning
from app.session import Session
from app.shapes import job_event
from app.telemetry import Telemetry
from runtime.families import FAMILIES
from runtime.messages import Plan


class Console:
    """The jobs, media, events, telemetry and the one session of a runs folder."""

    def __init__(
        self,
        root: Path,
        plan: Plan,
        *,
        families: Mapping[str, str] = FAMILIES,
        nvml: Any = pynvml,
    ) -> None:
        """Opens the folder and starts the engine with `plan`; ValueError if another console has it.

        nvml: the pynvml module, or one like it.
        """
        self.root = root
        with ExitStack() as opened:  # closed in the reverse order, also when one cannot open
            self.jobs = JobStore(root)
            opened.callback(self.jobs.close)
            self.hub = Hub()
            opened.callback(self.hub.close)
            self.media = MediaLibrary(root / "media")
            self.telemetry = opened.enter_context(Telemetry(self.hub, nvml=nvml))
            self.session = opened.enter_context(
                Session(
                    self.jobs,
                    self.hub,
                    root,
                    plan,
                    shape=self._event,
                    families=families,
                    marks=self.telemetry,
                    parity=parity_runs.run,
                    owner=LOCAL.name,
                )
            )
            self.planning = Planning(root, self.jobs, self.hub, self.telemetry, self.session)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Interrupts what runs, ends the engine, lets go of the folder; may be called again."""
        self._opened.close()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _event(self, job: Job) -> dict[str, Any]:
        return job_event(self, job)
