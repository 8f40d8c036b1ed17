"""A progress bar on stderr: redrawn in place on a terminal, else lines (of bytes: the end only)."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from app.timing import amount
from runtime.messages import Progress

_CELLS = 28
_LINES = 100  # of one stage, when every change is a line


class Bar:
    """Draws Progress events; `close` leaves the cursor on a fresh line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """stream: None for what stderr is now, which need not be what it was at import."""
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._stage = ""
        self._began = 0.0

    def draw(self, event: Progress) -> None:
        """Shows the stage, how far it is, and how long it has taken."""
        if event.stage != self._stage:
            self.close()
            self._stage, self._began = event.stage, time.monotonic()
        every = max(1, event.total // _LINES)
        if self._live:
            self._stream.write(f"\r{self._line(event)}\x1b[K")
        elif event.done % every == 0 or event.done == event.total:
            detail = f" ({event.detail})" if event.detail else ""
            self._stream.write(f"{event.stage} {amount(event)}{detail}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line between the bars."""
        self.close()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Ends the line of a bar."""
        if self._live and self._stage:
            self._stream.write("\n")
        self._stage = ""

    def _line(self, event: Progress) -> str:
        filled = _CELLS * event.done // max(event.total, 1)
        bar = "━" * filled + "─" * (_CELLS - filled)
        seconds = time.monotonic() - self._began
        return f"{event.stage:<18} {bar} {amount(event):>7}  {seconds:5.1f} s  {event.detail}"
