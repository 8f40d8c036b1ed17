"""Watches GPUs and host: a sampling thread, half an hour of samples, and the marks of the runs."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import psutil
import pynvml

from app.nvml_facts import LEGEND
from app.recording import Recording
from app.sampler import Sampler, limit
from app.telemetry_ring import KEPT_SECONDS, Mark, Ring, Sample
from runtime.media.files import write_bytes_atomic

MOST_HZ = 10.0
LEAST_HZ = 0.2
_IDLE_HZ = 1.0
_READING_SECONDS, _POLL_SECONDS = 5.0, 0.02
_PUBLISH_SECONDS = 0.45  # a page draws no faster, and the hub's memory is for other events
_LOOK_SECONDS = 30.0  # that links() keeps the NVLinks being read one by one
_REOPEN_SECONDS = 20.0
_COST_SECONDS = 5.0


class Publisher(Protocol):
    """The hub, as far as it is needed here."""

    @property
    def readers(self) -> int:
        """How many listen."""

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Sends an event to whoever listens."""


class Telemetry:
    """Samples once a second, up to ten times while something is measured; any thread may ask.

    It takes less than 1 % of a core, 5 % while measuring: see app/sampler.py.
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
        self._sampler = Sampler(nvml, environment)
        self._gpus = self._sampler.gpus
        self._lock = threading.Lock()
        self._ring = Ring()
        self._benchmarks = 0
        self._recordings: list[Recording] = []
        self._looked = -math.inf  # at the links, monotonic seconds
        self._hastened: set[str] = set()  # groups of readings
        self._asked = (0.0, 0.0)  # Hz, and until when (monotonic)
        self._wake = threading.Event()
        self._closing = False
        self._cost = 0.0
        self._published = 0.0
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

    @contextmanager
    def recording(self, path: Path, *, fast: bool) -> Iterator[Recording]:
        """Keeps samples and marks of the block in `path` as they come, one sample a second.

        fast: benchmarking(). At the end all samples replace them if the ring still has them.
        """
        recording = Recording(path, time.time())
        with ExitStack() as block:
            if fast:
                block.enter_context(self.benchmarking())
            with self._lock:
                self._recordings.append(recording)
            try:
                yield recording
            finally:
                with self._lock:
                    self._recordings.remove(recording)
                self._finish(recording)

    def mark(self, text: str, kind: str, id: str) -> None:
        """Notes that something begins or ends now, such as ("denoise", "stage", the run's id)."""
        mark = Mark(t=time.time(), mark=text, kind=kind, id=id)
        line = self._ring.mark(mark)
        with self._lock:
            if kind == "run":
                self._hastened.add("energy")
            recordings = tuple(self._recordings)
        for recording in recordings:
            recording.append(line)
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
            "cost_limit": limit(self.hz, links=self._links_shown()),
            "reading_ms": self._sampler.costs,
        }

    def since(self, t: float, most: int = 900) -> bytes:
        """JSON {now, hz, samples, marks} of what is newer than `t`, thinned to `most` samples."""
        return self._ring.since(t, most, self.hz)

    def slice(self, t0: float, t1: float) -> list[Sample | Mark]:
        """Every sample and mark of the time from `t0` to `t1` (epoch seconds), in order."""
        return [json.loads(line) for line in self._ring.lines(t0, t1)]

    def links(self) -> list[list[tuple[int | None, int | None]]]:
        """Bytes/s sent and received of each NVLink, per GPU; [] until read.

        They are read while somebody asks, within ten seconds; up to 5 % of a core is used then.
        """
        self._looked = time.monotonic()
        return self._gpus.links

    def totals(self) -> list[dict[str, int]]:
        """Bytes that each GPU has counted since its driver was loaded, where it counts."""
        return self._gpus.totals

    def totals_now(self) -> list[dict[str, int]]:
        """`totals`, with NVLink's read after this call: links at rest are not read for 10 seconds.

        As last read where no reading comes within five seconds. Call it while benchmarking().
        """
        asked = time.monotonic()
        self._wake.set()
        while self._gpus.read_at("nvlink") < asked and time.monotonic() - asked < _READING_SECONDS:
            with self._lock:
                self._hastened.add("nvlink")  # again: a tick that had begun would count as earlier
            time.sleep(_POLL_SECONDS)
        return self._gpus.totals

    def latest(self) -> Sample | None:
        """The newest sample, if there is one yet."""
        newest = self._ring.latest()
        return None if newest is None else json.loads(newest)

    def close(self) -> None:
        """Ends the thread and gives NVML back; may be called again."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _links_shown(self) -> bool:
        return time.monotonic() - self._looked < _LOOK_SECONDS

    def _finish(self, recording: Recording) -> None:
        now = time.time()
        if recording.trouble or now - recording.began > KEPT_SECONDS:
            return
        lines = self._ring.lines(recording.began, now)
        try:
            write_bytes_atomic(recording.path, b"".join(line + b"\n" for line in lines))
        except OSError as error:
            recording.trouble = f"the telemetry of this run is kept once a second only: {error}"

    def _run(self) -> None:
        psutil.cpu_percent(None)  # the first answer, and one too soon after it, is always 0.0
        self._gpus.open()
        now = opened = began = time.monotonic()
        due = now + 1 / MOST_HZ
        spent = self._spent()
        while not self._closing:
            if self._wake.wait(max(0.0, due - time.monotonic())):  # another rate, or the end
                self._wake.clear()
                due = min(due, now + self._sampler.pause(self.hz))
                continue
            now = time.monotonic()
            if self._gpus.incomplete and now - opened > _REOPEN_SECONDS:
                self._gpus.open()
                opened = now
            self._tick(now)
            due = now + self._sampler.pause(self.hz)  # what was missed is not made up for
            if now - began > _COST_SECONDS:
                self._cost = (self._spent() - spent) / (now - began)
                began, spent = now, self._spent()
        self._gpus.close()

    def _spent(self) -> float:
        return time.thread_time() + self._gpus.pcie_seconds

    def _tick(self, now: float) -> None:
        t, memory = time.time(), psutil.virtual_memory()
        used = memory.total - memory.available
        with self._lock:
            recordings, hastened = tuple(self._recordings), self._hastened
            busy = bool(recordings or self._benchmarks)
            self._hastened = set()
        for group in hastened:
            self._sampler.hasten(group)
        gpus = self._sampler.tick(
            now,
            hz=self.hz,
            busy=busy,
            links=self._links_shown(),
            ram_used=used,
            ram_total=memory.total,
        )
        cpu = psutil.cpu_percent(None)
        sample = Sample(t=t, cpu=cpu, ram_used=used, ram_total=memory.total, gpus=gpus)
        line = self._ring.sample(sample)
        for recording in recordings:
            recording.sample(t, line)
        if self._hub.readers and now - self._published > _PUBLISH_SECONDS:
            self._published = now
            self._hub.publish("telemetry", dict(sample))
