"""One upload on its way into the library, and the child process that looks into it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import unicodedata
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from app.children import run_child
from app.errors import NoRoom, TooLarge
from runtime.media.files import write_json_atomic
from runtime.media.info import MediaInfo

if TYPE_CHECKING:
    from app.media import Media, MediaLibrary

FACTS, THUMB = ".media.json", ".thumb.webp"  # no uploaded file's name begins with a dot
PROBE_SECONDS = 60.0
_READER = "runtime.media.probe_child"


def called(path: Path) -> str:
    """What its user calls a file: the name it was uploaded under, or its path of no library."""
    record = path.parent / FACTS
    if not record.is_file():
        return str(path)
    return str(json.loads(record.read_text(encoding="utf-8"))["name"])


class Incoming:
    """One upload: written piece by piece, then kept or forgotten. Made by MediaLibrary.begin.

    write raises TooLarge over the size of a file or the owner's quota; keep raises ValueError for
    what is no picture, video or sound. Neither leaves anything behind once the block is left.
    """

    def __init__(self, library: MediaLibrary, owner: str, name: str) -> None:
        self._library, self._owner = library, owner
        self.name = _shown(name)
        self._folder = library.aside()
        self._folder.mkdir(mode=0o700)
        self.path = self._folder / _stored(self.name)
        self._file = self.path.open("wb")
        self._hash = hashlib.sha256(owner.encode() + b"\0")
        self._bytes = 0

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._library.free(self._owner, self._bytes)
        shutil.rmtree(self._folder, ignore_errors=True)  # gone already if it was kept

    def write(self, chunk: bytes) -> None:
        """Takes the next piece."""
        library = self._library
        self._bytes += len(chunk)
        if library.reserve(self._owner, len(chunk)) > library.quota_bytes:
            raise TooLarge(
                f"{self.name} does not fit in your library of {_gib(library.quota_bytes)}; remove "
                f"files that you no longer need"
            )
        if self._bytes > library.most_bytes:
            raise TooLarge(
                f"{self.name} is larger than {_gib(library.most_bytes)}, the most that one file "
                f"may have; shorten it or make it smaller"
            )
        if shutil.disk_usage(self._folder).free < library.spare_bytes + len(chunk):
            raise NoRoom(
                f"the disk of the console is almost full, so {self.name} was not kept; remove "
                f"files or runs"
            )
        self._hash.update(chunk)
        self._file.write(chunk)

    def read(self, command: str, *arguments: Path) -> str:
        """What a child process prints of the whole file (commands of probe_child)."""
        self._file.flush()
        with self._library.probes:
            return look(command, self.path, self.name, *arguments)

    def keep(self) -> Media:
        """Probes the file and gives it its place for good; the same content is kept once."""
        if not self._bytes:
            raise ValueError(f"{self.name} is empty (0 bytes); choose another file")
        info = MediaInfo(**json.loads(self.read("probe", self._folder / THUMB)))
        os.fsync(self._file.fileno())
        id = self._hash.hexdigest()[:24]
        record = {
            "owner": self._owner,
            "name": self.name,
            "file": self.path.name,
            "created": time.time(),
            "facts": asdict(info),
        }
        write_json_atomic(self._folder / FACTS, record)  # also makes the thumbnail's entry durable
        return self._library.place(id, self._folder)


def look(command: str, path: Path, name: str, *others: Path) -> str:
    """What probe_child prints; its sentences call the file `name`. ValueError when unreadable."""
    arguments = [command, str(path), *map(str, others)]
    try:
        return run_child(_READER, arguments, what=name, seconds=PROBE_SECONDS)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), name)) from error


def _shown(name: str) -> str:
    """The last part of a file name as a browser sends it, without control characters."""
    last = unicodedata.normalize("NFC", name).replace("\\", "/").rpartition("/")[2]
    kept = "".join(c for c in last if c.isprintable())
    return kept[-200:].strip() or "file"


def _stored(name: str) -> str:
    """A harmless name on the disk that still tells which file it is."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-80:].lstrip("._-")
    return plain or "file"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
