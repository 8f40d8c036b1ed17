"""The run that each user compares new timings with: one id per user, kept in <root>."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from runtime.media.files import write_json_atomic


class Baselines:
    """Reads and writes <root>/baselines.json; every method may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self._path = root / "baselines.json"
        self._lock = threading.Lock()

    def get(self, owner: str) -> str:
        """The id of the run that is pinned, "" if none is."""
        with self._lock:
            return self._read().get(owner, "")

    def put(self, owner: str, id: str) -> None:
        """Pins a run, or none with ""."""
        with self._lock:
            pinned = {**self._read(), owner: id}
            write_json_atomic(self._path, {name: run for name, run in pinned.items() if run})

    def _read(self) -> dict[str, str]:
        if not self._path.is_file():
            return {}
        pinned: dict[str, str] = json.loads(self._path.read_text(encoding="utf-8"))
        return pinned
