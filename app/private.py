"""What the runs folder keeps from other users of the machine: key, token, ended sessions."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from runtime.media.files import atomic_file

TOKEN = "console.token"


class SignedOut:
    """The sessions that were ended before their time, in a private file, until they expire."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._expires: dict[str, int] = {}
        if path.exists():
            pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
            self._expires = {nonce: int(end) for nonce, end in pairs}

    def __contains__(self, nonce: str) -> bool:
        return nonce in self._expires

    def add(self, nonce: str, expires: int) -> None:
        """Notes one session; those that have expired meanwhile are forgotten."""
        with self._lock:
            now = self._clock()
            self._expires = {n: end for n, end in self._expires.items() if end > now}
            self._expires[nonce] = expires
            text = "".join(f"{n} {end}\n" for n, end in self._expires.items())
            write_private(self._path, text)


def kept_token(root: Path) -> tuple[str, bool]:
    """The random token of a runs folder and whether it was made just now."""
    path = root / TOKEN
    if path.exists():
        return path.read_text(encoding="ascii").strip(), False
    root.mkdir(parents=True, exist_ok=True)
    token = secrets.token_urlsafe(24)
    write_private(path, token + "\n")
    return token, True


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read: the whole text or none."""
    with atomic_file(path) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)


def signing_key(path: Path) -> bytes:
    """The key that signs cookies: made once, so that sessions outlive a restart."""
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return bytes.fromhex(path.read_text(encoding="ascii"))
