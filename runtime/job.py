"""One command being served: how it reports, stops and is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.cancel import Cancelled
from runtime.clock import StageClock
from runtime.messages import Event, Note, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """notes: so far; the mp4 carries them too."""

    id: str
    emit: Callable[[Event], None]
    cancelled: Callable[[], bool]
    clock: StageClock
    notes: list[str] = field(default_factory=list)

    def note(self, text: str, *, warning: bool = False) -> None:
        """For the run's record."""
        self.notes.append(text)
        self.emit(Note(request_id=self.id, text=text, warning=warning))

    def progress(self, stage: str, done: int, total: int, detail: str = "") -> None:
        """How far a stage is."""
        self.emit(Progress(request_id=self.id, stage=stage, done=done, total=total, detail=detail))

    def check(self) -> None:
        """Raises Cancelled once the user has asked to stop."""
        if self.cancelled():
            raise Cancelled

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A timed stage of one piece."""
        self.progress(name, 0, 1)
        with self.clock.stage(name):
            yield
        self.progress(name, 1, 1)
