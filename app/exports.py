"""A run as something to take away: timings as CSV, and the whole folder as a streamed zip."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app import records
from app.records import Record
from app.timing import ALL_COMMUNICATION, KERNELS

_CHUNK_BYTES = 1 << 20
_STORED = (".mp4", ".webp", ".safetensors")  # no smaller when deflated
_WHOLE = ("request.toml", "plan.toml", "events.jsonl", records.TELEMETRY)
_ABOUT = ("run", "plan", "kind", "stage", "rank")
_HEAD = (*_ABOUT, "step_index", "start_seconds", "seconds", "peak_bytes")
_FILES = (records.VIDEO, records.LATENTS, records.THUMB)


def timings_csv(timings: dict[str, Any]) -> str:
    """One row per standard column, then one per stage; "step_index" counts from 0.

    What was not measured is an empty cell; so is the start of the parts of a step, which are sums.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(_HEAD)
    about = (_cell(timings["id"]), _cell(timings["plan"]))
    for name, seconds in timings["columns"]:
        rows.writerow((*about, "column", name, "", "", "", _number(seconds), ""))
    for s in timings["stages"]:
        step = s["step"] if s["step"] >= 0 else ""
        start = "" if s["stage"] in (*KERNELS, ALL_COMMUNICATION) else s["start"]
        figures = (s["rank"], step, start, s["seconds"], _number(s["peak_bytes"]))
        rows.writerow((*about, "stage", s["stage"], *figures))
    return text.getvalue()


def zipped(folder: Path, record: Record, *, whole: bool) -> Iterator[bytes]:
    """The zip of a run, made while it is read: at most a mebibyte of it is in memory.

    whole: with request.toml, plan.toml and events.jsonl, which name this machine's folders.
    """
    out = _Drain()
    texts = {
        "run.json": json.dumps(record, ensure_ascii=False, indent=2),
        "timings.csv": timings_csv(records.timings(record, live=False)),
    }
    names = (*(_WHOLE if whole else (records.TELEMETRY,)), *_FILES)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"{folder.name}/{name}", text)
        for name in names:
            file = records.inside(folder.parent, folder.name, name)
            if file is not None:
                yield from _packed(archive, file, f"{folder.name}/{name}", out)
    yield out.take()


def _packed(archive: zipfile.ZipFile, file: Path, name: str, out: _Drain) -> Iterator[bytes]:
    entry = zipfile.ZipInfo.from_file(file, name)
    entry.compress_type = zipfile.ZIP_STORED if file.suffix in _STORED else zipfile.ZIP_DEFLATED
    with file.open("rb") as source, archive.open(entry, "w") as target:
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            yield out.take()
    yield out.take()


def _number(value: float | None) -> float | str:
    return "" if value is None else value


def _cell(text: str) -> str:
    """A spreadsheet runs a cell that begins like a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


class _Drain(io.RawIOBase):
    """Where the zip is written to; what was written is taken out again and again."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def writable(self) -> bool:
        """Only that: zipfile streams into what cannot seek."""
        return True

    def write(self, data: Any) -> int:
        """Keeps the data until it is taken."""
        self._bytes += data
        return len(data)

    def take(self) -> bytes:
        """What was written since the last call."""
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken
