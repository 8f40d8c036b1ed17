"""The files that users bring: kept by content for each owner, read only by a child process."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from app.access import User
from app.errors import Missing
from app.incoming import FACTS, THUMB, Incoming, look
from runtime.media.files import sync
from runtime.media.info import MediaInfo, MediaKind
from runtime.quoted import quoted

MOST_BYTES = 4 << 30  # of one file
QUOTA_BYTES = 50 << 30  # of one user
SPARE_BYTES = 1 << 30  # of the disk that uploads leave to runs and the job store
PROBES_AT_ONCE = 2
_CHUNK_BYTES = 1 << 20
_UNFINISHED = ".incoming-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One file of one owner; thumb is None for sounds, created in seconds since the epoch."""

    id: str
    owner: str
    name: str
    created: float
    path: Path
    thumb: Path | None
    facts: MediaInfo

    @property
    def kind(self) -> MediaKind:
        """image, video or audio."""
        return self.facts.kind


def facts(path: Path) -> MediaInfo:
    """What a file holds: as stored in the library, which notes its use, else by a child process.

    ValueError in one sentence when it can be read neither way.
    """
    record = path.parent / FACTS
    if record.is_file() and path.is_file():
        os.utime(record)
        return MediaInfo(**json.loads(record.read_text(encoding="utf-8"))["facts"])
    return MediaInfo(**json.loads(look("probe", path, path.name)))


class MediaLibrary:
    """The folder `root`; every method may be called from any thread."""

    def __init__(
        self,
        root: Path,
        *,
        quota_bytes: int = QUOTA_BYTES,
        most_bytes: int = MOST_BYTES,
        spare_bytes: int = SPARE_BYTES,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)
        self.root = root.resolve()
        self.quota_bytes, self.most_bytes, self.spare_bytes = quota_bytes, most_bytes, spare_bytes
        self._lock = threading.Lock()
        self.probes = threading.BoundedSemaphore(PROBES_AT_ONCE)
        self._media: dict[str, Media] = {}
        self._coming: dict[str, int] = {}  # bytes of unfinished uploads by owner
        for folder in self.root.iterdir():
            if folder.name.startswith(_UNFINISHED):
                shutil.rmtree(folder)
            elif (folder / FACTS).is_file():
                self._media[folder.name] = _read(folder)

    def list(self, user: User) -> tuple[Media, ...]:
        """The user's own files, newest first."""
        with self._lock:
            own = [media for media in self._media.values() if media.owner == user.name]
        return tuple(sorted(own, key=lambda media: media.created, reverse=True))

    def get(self, user: User, id: str) -> Media:
        """One file of this user (an admin: of anybody); Missing if there is none."""
        media = self._media.get(id)
        if media is None or not (user.admin or media.owner == user.name):
            raise Missing(f"there is no file {quoted(id)} in your library; add it again")
        return media

    def find(self, user: User, path: Path) -> Media | None:
        """The file of this user that stands at `path`, if it is one of the library."""
        media = self._media.get(path.parent.name)
        seen = media is not None and (user.admin or media.owner == user.name)
        return media if media is not None and seen and media.path == path else None

    def used_bytes(self, owner: str) -> int:
        """Bytes of all files of an owner, also of those that are just coming."""
        with self._lock:
            return self._used(owner)

    def _used(self, owner: str) -> int:
        kept = sum(m.facts.bytes for m in self._media.values() if m.owner == owner)
        return kept + self._coming.get(owner, 0)

    def add(self, owner: str, name: str, stream: BinaryIO) -> Media:
        """Copies a stream into the library; errors as in Incoming."""
        with self.begin(owner, name) as incoming:
            while chunk := stream.read(_CHUNK_BYTES):
                incoming.write(chunk)
            return incoming.keep()

    def begin(self, owner: str, name: str) -> Incoming:
        """A file that is about to come in pieces; leaving its `with` block forgets the rest."""
        return Incoming(self, owner, name)

    def remove(self, user: User, id: str) -> None:
        """Deletes one file; whether a job needs it is the caller's question."""
        folder = self.get(user, id).path.parent
        aside = self.aside()
        with self._lock:
            if self._media.pop(id, None) is not None:
                with suppress(FileNotFoundError):  # cleared behind the console's back
                    os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)  # a second caller has nothing to remove

    def older_than(self, seconds: float) -> tuple[Media, ...]:
        """What nobody has used for so long."""
        limit = time.time() - seconds
        with self._lock:
            every = tuple(self._media.values())
        return tuple(m for m in every if (m.path.parent / FACTS).stat().st_mtime < limit)

    def aside(self) -> Path:
        """A new folder's path for what is not in the library yet, or no longer."""
        return self.root / f"{_UNFINISHED}{secrets.token_hex(8)}"

    def reserve(self, owner: str, size: int) -> int:
        """Counts bytes that are coming; returns what the owner then has."""
        with self._lock:
            self._coming[owner] = self._coming.get(owner, 0) + size
            return self._used(owner)

    def free(self, owner: str, size: int) -> None:
        """The bytes are no longer coming: they are kept, or forgotten."""
        with self._lock:
            self._coming[owner] = self._coming.get(owner, 0) - size

    def place(self, id: str, folder: Path) -> Media:
        """Gives a finished folder its name; the same content that is there already stays."""
        with self._lock:
            if id not in self._media:
                os.rename(folder, self.root / id)
                sync(self.root)
                self._media[id] = _read(self.root / id)
            os.utime(self.root / id / FACTS)
            return self._media[id]


def _read(folder: Path) -> Media:
    record = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    thumb = folder / THUMB
    return Media(
        id=folder.name,
        owner=record["owner"],
        name=record["name"],
        created=record["created"],
        path=folder / record["file"],
        thumb=thumb if thumb.is_file() else None,
        facts=MediaInfo(**record["facts"]),
    )
