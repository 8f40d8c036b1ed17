"""Reads the GPUs as often as its share of a core allows; one thread, told what time it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from app.nvml import Gpus
from app.nvml_sample import GpuSample
from app.nvml_schedule import Schedule

REST, WORK = 0.01, 0.05  # of one core: at rest, and while measuring or while links are looked at
_AIM = 0.8  # of these: what a slow call takes beyond the plan must fit too


def limit(hz: float, *, links: bool) -> float:
    """The share of one core that sampling may take."""
    return WORK if links else min(WORK, REST * max(1.0, hz))


class Sampler:
    """`meter`: CPU seconds of the calling thread so far."""

    def __init__(
        self,
        nvml: Any,
        environment: Mapping[str, str],
        meter: Callable[[], float] = time.thread_time,
    ) -> None:
        self.gpus = Gpus(nvml, environment)
        self._schedule = Schedule(meter)
        self._share = REST * _AIM

    @property
    def costs(self) -> dict[str, float]:
        """CPU milliseconds of one GPU's reading, by group."""
        return {group: round(1000 * cost, 3) for group, cost in self._schedule.costs.items()}

    def tick(
        self, now: float, *, hz: float, busy: bool, links: bool, ram_used: int, ram_total: int
    ) -> list[GpuSample]:
        """One sample per GPU; `now` in monotonic seconds, RAM in bytes. See Gpu.wanted()."""
        self._share = _AIM * limit(hz, links=links)
        self._schedule.begin(now, self._share)
        wanted = self.gpus.wanted(1 / hz, busy=busy, links=links)
        self._schedule.run(wanted, lambda key: self.gpus.read(key, now))
        return self.gpus.samples(now, ram_used=ram_used, ram_total=ram_total)

    def pause(self, hz: float) -> float:
        """Seconds from the tick to the next one."""
        return max(1 / hz, self._schedule.pause(self._share))

    def hasten(self, group: str) -> None:
        """Every GPU's reading of this group is due: a difference begins or ends."""
        self._schedule.hasten(group)
