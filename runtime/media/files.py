"""Local files: what may be opened, their hashes, and writing that leaves a whole file or none."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.quoted import quoted

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # two letters or more: C: is a Windows drive


class DiskFullError(OSError):
    """No space left while writing; the message is one sentence with the path and what is free."""

    def __init__(self, path: Path) -> None:
        free_mib = shutil.disk_usage(path.parent).free / 2**20
        super().__init__(
            f"no space left to write {path}: its disk has {free_mib:.1f} MiB free; "
            f"free some or choose another output folder"
        )
        self.errno = errno.ENOSPC


def local_file(path: Path) -> Path:
    """Absolute path of an existing, non-empty, ordinary file; anything else is a ValueError.

    URLs and protocol strings (`http:`, `concat:`) are refused: an absolute path is never parsed
    for a protocol by FFmpeg.
    """
    if _SCHEME.match(str(path)):
        raise ValueError(
            f"{quoted(str(path))} is an address, not a file; download it and give its path"
        )
    try:
        resolved = Path(path).expanduser().resolve()
    except RuntimeError as error:  # a loop of links, or the home of a user that does not exist
        raise ValueError(f"{path} leads nowhere ({error}); check the path") from error
    if not resolved.exists():
        raise ValueError(f"{path} does not exist; check the path")
    if not resolved.is_file():
        raise ValueError(f"{path} is not an ordinary file; give the path of one media file")
    if resolved.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes); give a media file")
    return resolved


def content_hash(path: Path) -> str:
    """SHA-256 of the file's bytes as 64 hex digits; the key of every conditioning cache."""
    with local_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_of(path: Path) -> Path:
    """Where this process builds `path` before it gets its name; no other process writes there."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def remove_parts(folder: Path, pids: Iterable[int]) -> None:
    """Removes what these processes, since killed, were building in `folder`; nobody else's."""
    for pid in pids:
        for part in folder.glob(f"*.{pid}.part"):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink()


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields the path of a part in the same folder; the block fills it, then it becomes `path`.

    On any failure in the block the part is removed and an older `path` stays as it was.
    Raises DiskFullError when the disk is full. The folder is made if it is missing.
    """
    path = path.absolute()
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)  # before the free space is measured
        if error.errno == errno.ENOSPC:
            raise DiskFullError(path) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to `path`: the whole file or none."""
    with atomic_file(path) as part:
        part.write_bytes(data)


def write_json_atomic(path: Path, obj: Any) -> None:
    """Writes `obj` as indented UTF-8 JSON; NaN and infinities are a ValueError (not JSON)."""
    text = json.dumps(obj, ensure_ascii=False, indent=2, allow_nan=False)
    write_bytes_atomic(path, (text + "\n").encode())


def sync(path: Path) -> None:
    """Makes what was written to a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
