"""Which uploaded files are needed, and the removal of those that nobody has used for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.access import User
from app.jobs import JobStore
from app.media import MediaLibrary

KEPT_SECONDS = 90 * 24 * 3600.0
_EVERY_SECONDS = 24 * 3600.0

_KEEPER = User(name="", admin=True)


def needed(jobs: JobStore) -> frozenset[Path]:
    """The reference files of every job that waits or runs."""
    return frozenset(
        path
        for job in jobs.queue()
        if job.request is not None
        for reference in job.request.references
        for path in (reference.path, reference.soundtrack)
        if path is not None
    )


def sweep(library: MediaLibrary, jobs: JobStore, *, kept_seconds: float = KEPT_SECONDS) -> int:
    """Removes what was not used for `kept_seconds` and no job needs; returns how many."""
    old = library.older_than(kept_seconds)
    in_use = needed(jobs) if old else frozenset[Path]()
    gone = [media for media in old if media.path not in in_use]
    for media in gone:
        library.remove(_KEEPER, media.id)
    return len(gone)


@contextmanager
def sweeping(library: MediaLibrary, jobs: JobStore) -> Iterator[None]:
    """Sweeps now and once a day, in a thread, as long as the block lasts."""
    ended = threading.Event()

    def work() -> None:
        sweep(library, jobs)
        while not ended.wait(_EVERY_SECONDS):
            sweep(library, jobs)

    thread = threading.Thread(target=work, name="media sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
