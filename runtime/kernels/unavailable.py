"""The one error of a backend that cannot run here: its name and the reason, never a fallback."""

from __future__ import annotations


class Unavailable(ValueError):
    """The plan names a backend that this machine cannot run."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"backend {name!r} cannot run here: {reason}")
        self.name = name
        self.reason = reason
