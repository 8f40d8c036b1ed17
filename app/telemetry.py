"""Watches GPUs and host: a sampling thread, half an hour of samples, and the marks of the runs."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypedDict

import psutil
import pynvml

from app.nvml import Gpus
from app.nvml_facts import LEGEND
from app.nvml_gpu import GpuSample
from runtime.media.files import write_bytes_atomic

KEPT_SECONDS = 1800.0
MOST_HZ = 10.0
LEAST_HZ = 0.2
_IDLE_HZ = 1.0
_PUBLISH_SECONDS = 0.45  # a page draws no faster, and the hub's memory is for other events
_LINKS_SECONDS = 0.95  # NVLinks one by one: twice 18 counters a GPU
_REOPEN_SECONDS = 20.0
_COST_SECONDS = 5.0
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


class Publisher(Protocol):
    """The hub, as far as it is needed here."""

    @property
    def readers(self) -> int:
        """How many listen."""

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Sends an event to whoever listens."""


class Telemetry:
    """Samples once a second, up to ten times while something is measured; any thread may ask.

    `nvml`: the pynvml module, or one like it. The thread starts here and ends with close().
    """

    def __init__(
        self,
        hub: Publisher,
        *,
        nvml: Any = pynvml,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._hub = hub
        self._gpus = Gpus(nvml, environment)
        self._lock = threading.Lock()
        self._samples: deque[_Line] = deque()  # as JSON: a tenth of the dicts' memory
        self._marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        self._benchmarks = 0
        self._asked = (0.0, 0.0)  # Hz, and until when (monotonic)
        self._wake = threading.Event()
        self._closing = False
        self._cost = 0.0
        self._published = self._linked = 0.0
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def hz(self) -> float:
        """Samples a second at present."""
        asked, until = self._asked
        if self._benchmarks:
            return MOST_HZ
        return asked if time.monotonic() < until else _IDLE_HZ

    @property
    def cost(self) -> float:
        """The share of one core that the thread took in the last seconds."""
        return self._cost

    def set_rate(self, hz: float, seconds: float = 60.0) -> None:
        """Samples at `hz` for so many seconds; ValueError outside 0.2 to 10 Hz, 1 to 1800 s."""
        if not LEAST_HZ <= hz <= MOST_HZ:
            raise ValueError(f"hz must be {LEAST_HZ} to {MOST_HZ:.0f}, got {hz}")
        if not 1 <= seconds <= KEPT_SECONDS:
            raise ValueError(f"seconds must be 1 to {KEPT_SECONDS:.0f}, got {seconds}")
        self._asked = (hz, time.monotonic() + seconds)
        self._wake.set()

    @contextmanager
    def benchmarking(self) -> Iterator[None]:
        """Samples at 10 Hz inside the block; may be nested."""
        with self._lock:
            self._benchmarks += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._benchmarks -= 1

    def mark(self, text: str, kind: str, id: str) -> None:
        """Notes that something begins or ends now, such as ("denoise", "stage", the run's id)."""
        mark = Mark(t=time.time(), mark=text, kind=kind, id=id)
        with self._lock:
            self._marks.append(mark)
        self._hub.publish("mark", dict(mark))

    def info(self) -> dict[str, Any]:
        """What does not change: driver, GPUs in the order of the samples, topology; or `reason`."""
        return {
            "reason": self._gpus.reason,
            "driver": self._gpus.driver,
            "cuda": self._gpus.cuda,
            "gpus": [asdict(facts) for facts in self._gpus.facts],
            "topology": [[asdict(link) for link in row] for row in self._gpus.topology],
            "legend": dict(LEGEND),
            "cpus": os.cpu_count() or 1,
            "hz": self.hz,
            "kept_seconds": KEPT_SECONDS,
            "cost": round(self._cost, 5),
        }

    def since(self, t: float, most: int = 900) -> bytes:
        """JSON {now, hz, samples, marks} of what is newer than `t`, thinned to `most` samples."""
        samples, marks = self._between(math.nextafter(t, math.inf), math.inf)
        stride = max(1, -(-len(samples) // most))
        kept = [line for _, line in samples[::-1][::stride][::-1]]  # the newest always
        told = b",".join(line for _, line in marks)
        head = f'{{"now":{time.time():.3f},"hz":{self.hz:g},"marks":['.encode()
        return head + told + b'],"samples":[' + b",".join(kept) + b"]}"

    def slice(self, t0: float, t1: float) -> list[Sample | Mark]:
        """Every sample and mark of the time from `t0` to `t1` (epoch seconds), in order."""
        return [json.loads(line) for line in self._lines(t0, t1)]

    def save(self, path: Path, t0: float, t1: float) -> None:
        """Writes slice() as JSON lines; the whole file or none."""
        write_bytes_atomic(path, b"".join(line + b"\n" for line in self._lines(t0, t1)))

    def totals(self) -> list[dict[str, int]]:
        """Bytes that each GPU has counted since its driver was loaded, where it counts."""
        return self._gpus.totals

    def latest(self) -> Sample | None:
        """The newest sample, if there is one yet."""
        with self._lock:
            newest = self._samples[-1][1] if self._samples else b"null"
        return json.loads(newest)

    def close(self) -> None:
        """Ends the thread and gives NVML back; may be called again."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _between(self, t0: float, t1: float) -> tuple[list[_Line], list[_Line]]:
        """(samples, marks) in order."""
        with self._lock:
            samples = [entry for entry in self._samples if t0 <= entry[0] <= t1]
            marks = [mark for mark in self._marks if t0 <= mark["t"] <= t1]
        return samples, [(mark["t"], _line(mark)) for mark in marks]

    def _lines(self, t0: float, t1: float) -> list[bytes]:
        samples, marks = self._between(t0, t1)
        return [line for _, line in sorted([*samples, *marks], key=lambda entry: entry[0])]

    def _run(self) -> None:
        psutil.cpu_percent(None)  # the first answer, and one too soon after it, is always 0.0
        self._gpus.open()
        now = opened = began = time.monotonic()
        due = now + 1 / MOST_HZ
        spent = time.thread_time()
        while not self._closing:
            if self._wake.wait(max(0.0, due - time.monotonic())):  # another rate, or the end
                self._wake.clear()
                due = min(due, now + 1 / self.hz)
                continue
            now = time.monotonic()
            if self._gpus.incomplete and now - opened > _REOPEN_SECONDS:
                self._gpus.open()
                opened = now
            self._tick(now)
            due = now + 1 / self.hz  # what was missed is not made up for
            if now - began > _COST_SECONDS:
                self._cost = (time.thread_time() - spent) / (now - began)
                began, spent = now, time.thread_time()
        self._gpus.close()

    def _tick(self, now: float) -> None:
        memory = psutil.virtual_memory()
        used = memory.total - memory.available
        each_link = now - self._linked > _LINKS_SECONDS
        gpus = self._gpus.read(now, ram_used=used, ram_total=memory.total, each_link=each_link)
        sample = Sample(
            t=time.time(),
            cpu=psutil.cpu_percent(None),
            ram_used=used,
            ram_total=memory.total,
            gpus=gpus,
        )
        with self._lock:
            self._samples.append((sample["t"], _line(sample)))
            while self._samples[0][0] < sample["t"] - KEPT_SECONDS:
                self._samples.popleft()
        if each_link:
            self._linked = now
        if self._hub.readers and now - self._published > _PUBLISH_SECONDS:
            self._published = now
            self._hub.publish("telemetry", dict(sample))


def _line(entry: Sample | Mark) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()
