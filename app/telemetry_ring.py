"""The samples and marks of the last half hour, as JSON: a tenth of the memory of the dicts."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from typing import TypedDict

from app.nvml_sample import GpuSample

KEPT_SECONDS = 1800.0
_MOST_MARKS = 5000

_Line = tuple[float, bytes]  # epoch seconds, JSON


class Sample(TypedDict):
    """One moment: `t` in epoch seconds, `cpu` in %, RAM in bytes, one entry per GPU."""

    t: float
    cpu: float
    ram_used: int
    ram_total: int
    gpus: list[GpuSample]


class Mark(TypedDict):
    """Something that began or ended at `t` (epoch seconds): a run, a stage."""

    t: float
    mark: str
    kind: str
    id: str


class Ring:
    """Any thread may add and ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[_Line] = deque()
        self._marks: deque[_Line] = deque(maxlen=_MOST_MARKS)

    def sample(self, sample: Sample) -> bytes:
        """Keeps it, and forgets what is too old; its line."""
        line = _line(sample)
        with self._lock:
            self._samples.append((sample["t"], line))
            while self._samples[0][0] < sample["t"] - KEPT_SECONDS:
                self._samples.popleft()
        return line

    def mark(self, mark: Mark) -> bytes:
        """Keeps it; its line."""
        line = _line(mark)
        with self._lock:
            self._marks.append((mark["t"], line))
        return line

    def since(self, t: float, most: int, hz: float) -> bytes:
        """JSON {now, hz, samples, marks} of what is newer than `t`, thinned to `most` samples."""
        samples, marks = self._between(math.nextafter(t, math.inf), math.inf)
        stride = max(1, -(-len(samples) // most))
        kept = [line for _, line in samples[::-1][::stride][::-1]]  # the newest always
        told = b",".join(line for _, line in marks)
        head = f'{{"now":{time.time():.3f},"hz":{hz:g},"marks":['.encode()
        return head + told + b'],"samples":[' + b",".join(kept) + b"]}"

    def lines(self, t0: float, t1: float) -> list[bytes]:
        """Samples and marks of the time from `t0` to `t1`, in order."""
        samples, marks = self._between(t0, t1)
        return [line for _, line in sorted([*samples, *marks], key=lambda entry: entry[0])]

    def latest(self) -> bytes | None:
        """The newest sample's line, if there is one yet."""
        with self._lock:
            return self._samples[-1][1] if self._samples else None

    def _between(self, t0: float, t1: float) -> tuple[list[_Line], list[_Line]]:
        with self._lock:
            samples = [entry for entry in self._samples if t0 <= entry[0] <= t1]
            marks = [entry for entry in self._marks if t0 <= entry[0] <= t1]
        return samples, marks


def _line(entry: Sample | Mark) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()
