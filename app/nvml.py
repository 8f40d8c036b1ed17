"""The GPUs of this machine as NVML shows them: found, read, lost and found again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pynvml

from app.nvml_facts import GpuFacts, Link, cuda_order, gpu_facts, topology
from app.nvml_gpu import LOST, Gpu
from app.nvml_pcie import PcieThread
from app.nvml_sample import GpuSample
from app.nvml_schedule import Key


class Gpus:
    """All GPUs, those that CUDA numbers first; one thread reads, any may look at the facts."""

    def __init__(self, nvml: Any, environment: Mapping[str, str]) -> None:
        self._nvml = nvml
        self._environment = environment
        self._gpus: list[Gpu] = []
        self._pcie = PcieThread(nvml)
        self._counting: set[tuple[str, str]] = set()  # buses whose counters moved
        self._open = False
        self.reason = "NVML is being opened"  # why there is nothing to read, else ""
        self.driver = ""
        self.cuda = ""  # the newest CUDA that the driver serves
        self.topology: tuple[tuple[Link, ...], ...] = ()

    @property
    def facts(self) -> tuple[GpuFacts, ...]:
        """What does not change, per GPU, in the order of the samples."""
        return tuple(gpu.facts for gpu in self._gpus)

    @property
    def totals(self) -> list[dict[str, int]]:
        """The byte counters as last read, per GPU."""
        return [gpu.totals for gpu in self._gpus]

    def read_at(self, bus: str) -> float:
        """Since when the counters of that bus are known of every GPU that has any; inf without one.

        In monotonic seconds; -inf before the first reading.
        """
        alive = [gpu for gpu in self._gpus if not gpu.lost and gpu.counts(bus)]
        has = [gpu for gpu in alive if bus != "nvlink" or gpu.facts.nvlinks]
        return min((gpu.read_at(bus) for gpu in has), default=math.inf)

    @property
    def links(self) -> list[list[tuple[int | None, int | None]]]:
        """Bytes/s sent and received of each NVLink as last read, per GPU; [] where not read."""
        return [list(gpu.links) for gpu in self._gpus]

    @property
    def pcie_seconds(self) -> float:
        """CPU seconds that the thread for GPUs without PCIe counters has used."""
        return self._pcie.spent

    @property
    def incomplete(self) -> bool:
        """No driver, no GPU, or a lost one: open() may find it again."""
        return bool(self.reason) or any(gpu.lost for gpu in self._gpus)

    def open(self) -> None:
        """Finds the driver and the GPUs, and lost ones again; `reason` says what failed."""
        self.close()
        try:
            self._nvml.nvmlInit()
            self._open = True
            self.driver = str(self._nvml.nvmlSystemGetDriverVersion())
            version = self._nvml.nvmlSystemGetCudaDriverVersion_v2()
            self.cuda = f"{version // 1000}.{version % 1000 // 10}"
            found = list(self._find())
        except pynvml.NVMLError as error:
            self.reason = _why(error)
            for gpu in self._gpus:
                gpu.lose()
            return
        self._gpus = self._merged(found)
        self.reason = "" if self._gpus else "the NVIDIA driver shows no GPU"
        alive = [None if gpu.lost else gpu.handle for gpu in self._gpus]
        if None not in alive or len(self.topology) != len(alive):  # a lost one is joined as it was
            self.topology = topology(self._nvml, alive)

    def close(self) -> None:
        """Gives NVML back."""
        self._pcie.stop()
        if self._open:
            self._open = False
            try:
                self._nvml.nvmlShutdown()
            except pynvml.NVMLError:  # the driver has gone; nothing is left to give back
                return

    def wanted(self, tick: float, *, busy: bool, links: bool) -> dict[Key, float]:
        """Gpu.wanted() of all."""
        return {
            (gpu.facts.uuid, group): period
            for gpu in self._gpus
            for group, period in gpu.wanted(tick, busy=busy, links=links).items()
        }

    def read(self, key: Key, now: float) -> None:
        """One group of one GPU; `now` in monotonic seconds."""
        uuid, group = key
        for gpu in self._gpus:
            if gpu.facts.uuid == uuid:
                gpu.read(group, now)

    def samples(self, now: float, *, ram_used: int, ram_total: int) -> list[GpuSample]:
        """One per GPU; RAM in bytes, for unified memory."""
        return [gpu.sample(now, ram_used=ram_used, ram_total=ram_total) for gpu in self._gpus]

    def _find(self) -> Iterator[Gpu]:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                facts = gpu_facts(self._nvml, handle, index)
            except pynvml.NVMLError as error:
                if error.value not in LOST:
                    raise
                continue
            yield Gpu(self._nvml, handle, facts, self._pcie, self._counting)

    def _merged(self, found: list[Gpu]) -> list[Gpu]:
        """Known GPUs in their places, lost or going on; then the new ones in CUDA's order.

        A GPU that drops out shifts NVML's numbers, but not those of processes that run.
        """
        by_uuid = {gpu.facts.uuid: gpu for gpu in found}
        taken = {gpu.facts.cuda for gpu in self._gpus}
        kept = []
        for earlier in self._gpus:
            gpu = by_uuid.pop(earlier.facts.uuid, None)
            if gpu is None:
                earlier.lose()
            elif not earlier.lost:
                gpu.go_on_from(earlier)
            if gpu is not None:
                gpu.facts = earlier.facts
            kept.append(gpu or earlier)
        for facts in cuda_order([gpu.facts for gpu in found], self._environment):
            if facts.uuid in by_uuid:
                number = None if facts.cuda in taken else facts.cuda
                by_uuid[facts.uuid].facts = replace(facts, cuda=number)
        last = len(found)
        return kept + sorted(
            by_uuid.values(), key=lambda gpu: last if gpu.facts.cuda is None else gpu.facts.cuda
        )


def _why(error: pynvml.NVMLError) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "this machine has no NVIDIA driver (libnvidia-ml.so.1 was not found)"
    return f"the NVIDIA driver does not answer ({error})"
