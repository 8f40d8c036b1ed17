"""Takes goldens into a console: a folder of this machine, or an uploaded .safetensors or .zip.

Only safetensors files get in, and only with a header that can be read without running anything;
a collection is there whole or not at all.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Protocol

from app.errors import NoRoom, TooLarge, WrongState
from app.goldens import CHECKOUT_NAME, CHECKPOINTS, FACTS, Goldens, golden_header
from runtime.checkpoints.header import read_header
from runtime.media.files import part_of, write_json_atomic
from runtime.quoted import quoted

MOST_BYTES = 8 << 30  # of one upload, unpacked
MOST_FILES = 2000
_CHUNK_BYTES = 1 << 20
_MOST_NAME_BYTES = 200
_KEEP_FREE_BYTES = 1 << 30
_PASSED_OVER = (".md", ".json", ".txt")  # of a zip: what people put beside goldens

_DAMAGED = (  # what zipfile and its decompressors raise; RuntimeError is an encrypted one
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(NotImplementedError, RuntimeError),
)


class Readable(Protocol):
    """What a file's bytes are taken from."""

    def read(self, size: int, /) -> bytes:
        """At most so many bytes; none at the end."""


Write = Callable[[PurePosixPath, Readable], None]


def import_folder(goldens: Goldens, owner: str, folder: Path) -> str:
    """Copies the goldens of a folder of this machine, with its checkpoints; the new name."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder that holds the goldens")
    files = sorted(folder.glob("*.safetensors"))
    files += sorted((folder / CHECKPOINTS).glob("*.safetensors"))
    with _collection(goldens, owner, folder.resolve().name) as write:
        _room(goldens.folder, sum(file.stat().st_size for file in files))
        for file in files:
            with file.open("rb") as stream:
                write(PurePosixPath(file.relative_to(folder)), stream)
    return _tidy(folder.resolve().name)


def import_upload(goldens: Goldens, owner: str, name: str, stream: BinaryIO) -> str:
    """Takes an uploaded golden or zip of goldens, a folder `checkpoints` in it; the new name."""
    suffix, stem = PurePosixPath(name).suffix.lower(), _tidy(PurePosixPath(name).stem)
    if suffix == ".safetensors":
        with _collection(goldens, owner, stem) as write:
            write(PurePosixPath(f"{stem}.safetensors"), stream)
    elif suffix == ".zip":
        with _collection(goldens, owner, stem) as write:
            _unpack(stream, write, goldens.folder)
    else:
        raise ValueError(
            f"{quoted(name)} is not taken: a golden is a .safetensors file, or a .zip of them with "
            "a folder 'checkpoints'; a .pt file can run code and is never opened here"
        )
    return stem


def discard(collection: Path) -> None:
    """Deletes an imported collection: it is gone at once, its bytes a little later."""
    aside = part_of(collection)
    os.rename(collection, aside)
    shutil.rmtree(aside)


@contextmanager
def _collection(goldens: Goldens, owner: str, name: str) -> Iterator[Write]:
    """A new collection, filled by the block; it appears once every file was found good."""
    name = _tidy(name)
    target = goldens.folder / name
    if target.exists() or name in (CHECKOUT_NAME, CHECKPOINTS):
        raise WrongState(
            f"there is a collection {quoted(name)} already; delete it or rename your file"
        )
    part = part_of(target)
    goldens.folder.mkdir(parents=True, exist_ok=True)
    try:
        part.mkdir()
    except FileExistsError as error:
        raise WrongState(
            f"a collection {quoted(name)} is just being imported; wait for it"
        ) from error
    written = 0

    def write(path: PurePosixPath, stream: Readable) -> None:
        nonlocal written
        file = part / path
        _check_name(path.name)
        if file.exists():
            raise ValueError(f"there are two files {quoted(path.name)}; leave one out")
        file.parent.mkdir(exist_ok=True)
        with file.open("xb") as out:
            while chunk := stream.read(_CHUNK_BYTES):
                written += len(chunk)
                if written > MOST_BYTES:
                    raise TooLarge(
                        f"{name} has more than {MOST_BYTES >> 30} GiB; import its folder"
                    )
                if shutil.disk_usage(part).free < _KEEP_FREE_BYTES + len(chunk):
                    raise NoRoom(f"the disk of the console is almost full, so {name} was not kept")
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        header = read_header(file)
        if path.parent.name != CHECKPOINTS:
            golden_header(header)

    try:
        yield write
        if not any(part.glob("*.safetensors")):
            raise ValueError(
                f"{name} holds no golden (*.safetensors); docs/goldens.md has the format"
            )
        write_json_atomic(part / FACTS, {"owner": owner, "imported": time.time()})
        os.rename(part, target)
    except (ValueError, OSError) as error:
        if str(part) in str(error):  # say the file's name, not where it was being built
            raise type(error)(str(error).replace(f"{part}/", "")) from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unpack(stream: BinaryIO, write: Write, folder: Path) -> None:
    try:
        with zipfile.ZipFile(stream) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) > MOST_FILES:
                raise TooLarge(
                    f"the zip holds {len(members)} files; at most {MOST_FILES} are taken"
                )
            _room(folder, sum(m.file_size for m in members))
            top = _common_top([PurePosixPath(m.filename) for m in members])
            for member in members:
                path = _inside(PurePosixPath(member.filename), top)
                if path is not None:
                    with archive.open(member) as file:
                        write(path, _Packed(file))
    except _DAMAGED as error:
        raise ValueError(
            f"the zip cannot be read ({error}); pack it again, not encrypted"
        ) from error


class _Packed:
    """A member of a zip; bzip2 calls damage an OSError, which else is a fault of the disk."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise zipfile.BadZipFile(str(error)) from error


def _check_name(name: str) -> None:
    """ValueError for a file name that the disk does not take or that cannot be shown."""
    if not name.isprintable() or len(name.encode()) > _MOST_NAME_BYTES:
        raise ValueError(
            f"the file name {quoted(name)} is too long or has characters that do not print; "
            "rename the file"
        )


def _common_top(paths: list[PurePosixPath]) -> str:
    """The one folder that everything lies in, as when a folder was packed; "" without one."""
    tops = {path.parts[0] for path in paths if len(path.parts) > 1}
    single = len(tops) == 1 and not any(len(path.parts) == 1 for path in paths)
    top = tops.pop() if single else ""
    return "" if top == CHECKPOINTS else top


def _inside(path: PurePosixPath, top: str) -> PurePosixPath | None:
    """Where a member of a zip goes; None: passed over; ValueError: may not be in it."""
    inner = path.relative_to(top) if top else path
    if path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise ValueError(f"the zip names {quoted(str(path))}, which leads out of it; pack it again")
    if path.suffix.lower() in _PASSED_OVER or path.name.startswith(".") or "__MACOSX" in path.parts:
        return None
    if path.suffix != ".safetensors" or str(inner.parent) not in (".", CHECKPOINTS):
        raise ValueError(
            f"the zip holds {quoted(str(path))}; only .safetensors files are taken, goldens at the "
            f"top and their checkpoints in '{CHECKPOINTS}'"
        )
    return inner


def _room(folder: Path, size: int) -> None:
    """ValueError when the disk would be left without room to work."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > MOST_BYTES:
        raise TooLarge(f"the files have {size / 2**30:.1f} GiB; {MOST_BYTES >> 30} GiB are taken")
    if size + _KEEP_FREE_BYTES > free:
        raise ValueError(
            f"the files need {size / 2**30:.1f} GiB and the disk of {folder} has "
            f"{free / 2**30:.1f} GiB free; free some"
        )


def _tidy(name: str) -> str:
    """A name that is safe as a folder and in an address."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:80] or "goldens"
