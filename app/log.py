"""Lines appended to a private file: the audit log and what went wrong in the console."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

MOST_BYTES = 8 << 20


class Log:
    """One file of mode 0600; when it is full it becomes NAME.1 and a new one begins."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._lock = threading.Lock()

    def text(self, text: str) -> None:
        """Appends a text under a line with the time."""
        self._append(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text.rstrip()}\n")

    def line(self, **facts: str | int | float) -> None:
        """Appends one JSON line: the time in seconds since the epoch and the facts."""
        self._append(json.dumps({"time": round(time.time(), 3), **facts}) + "\n")

    def _append(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        with self._lock:
            if self.path.exists() and self.path.stat().st_size + len(data) > self._most_bytes:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            try:
                with os.fdopen(os.open(self.path, flags, 0o600), "wb") as file:
                    file.write(data)
            except OSError as error:  # a full disk must not undo an answer, that of a deletion say
                print(f"{self.path.name}: {error.strerror}: {text}", end="", file=sys.stderr)
