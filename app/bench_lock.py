"""One benchmark at a time on a machine: two at once would measure each other."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(command: str) -> Iterator[None]:
    """ValueError while another benchmark of this machine runs; the kernel ends the lock with us."""
    path = Path(tempfile.gettempdir()) / "h3-bench.lock"
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.read(descriptor, 200).decode(errors="replace").strip()
            raise ValueError(
                f"{said or 'another benchmark'} is measuring on this machine, and two at once "
                f"would slow each other; wait until it has ended"
            ) from None
        if os.fstat(descriptor).st_uid == os.getuid():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{command} (process {os.getpid()})\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """The file of whoever measured first; that of another user is read only."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
