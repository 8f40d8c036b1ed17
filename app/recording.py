"""A run's telemetry.jsonl: grows once a second while it runs, and outlives a killed console."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_SPACING_SECONDS = 0.95


class Recording:
    """Appends whole lines, from any thread; `trouble` says why it stopped, which fails no run."""

    def __init__(self, path: Path, began: float) -> None:
        self.path = path
        self.began = began  # epoch seconds
        self.trouble = ""
        self._lock = threading.Lock()
        self._sampled = 0.0

    def sample(self, t: float, line: bytes) -> None:
        """Keeps a sample of the time `t`, unless the last one is younger than a second."""
        if t - self._sampled >= _SPACING_SECONDS:
            self._sampled = t
            self.append(line)

    def append(self, line: bytes) -> None:
        """Keeps a line; one that a kill or a full disk cut short is taken off again."""
        with self._lock:
            if self.trouble:
                return
            try:
                _append(self.path, line + b"\n")
            except OSError as error:
                self.trouble = f"the telemetry of this run is not kept whole: {error}"


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        try:
            while data:
                data = data[os.write(file, data) :]
        except OSError:
            os.ftruncate(file, end)
            raise
    finally:
        os.close(file)


def mend(path: Path) -> None:
    """Takes off a last line that a killed console did not finish; nothing else is touched."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
