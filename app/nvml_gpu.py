"""One GPU's readings in plain units; what it cannot tell is None and is not asked for again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from app.nvml_counters import Counters
from app.nvml_facts import GpuFacts
from app.nvml_pcie import PcieThread
from app.nvml_sample import REASONS, GpuSample, nothing

LOST = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
_UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a driver older than the binding
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # a field id that this driver does not know
    }
)
_ALL_LINKS = 0xFFFFFFFF  # scope 0 would be link 0 alone
_KIB = 1024
_TX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
_POWER = {"power": (pynvml.NVML_FI_DEV_POWER_INSTANT, 0)}
_MEMORY_TEMP = {"mem_temp": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0)}
_ENERGY = {"energy": (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0)}
_BUSES: Mapping[str, tuple[Mapping[str, tuple[int, int]], int]] = {  # bus: fields, bytes a count
    "pcie": (
        {
            "pcie_tx": (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0),
            "pcie_rx": (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0),
        },
        1,
    ),
    "nvlink": ({"nvlink_tx": (_TX, _ALL_LINKS), "nvlink_rx": (_RX, _ALL_LINKS)}, _KIB),
}
_LOAD_SECONDS = 0.5  # the driver's own utilisation is the mean of up to a second
_ENERGY_SECONDS = 30.0
_STILL_SECONDS, _STILL_BUSY_SECONDS = 10.0, 2.0  # a bus that does not move; while a run goes on
_MOVING = 1e6  # bytes/s
_LINKS_SECONDS = 10.0  # for all links of a GPU
_LINKS_AT_ONCE = 3  # 0.87 ms a counter on an H200
# c_nvmlValue_t's member by valueType; nvmlValueType_t
_VALUE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class Gpu:
    """A GPU under its NVML handle, what it does not support, and its numbers so far."""

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        facts: GpuFacts,
        pcie: PcieThread,
        counting: set[tuple[str, str]],
    ) -> None:
        self.handle = handle
        self.facts = facts
        self.lost = False
        self.links: list[tuple[int | None, int | None]] = []  # bytes/s sent, received, per NVLink
        self._nvml = nvml
        self._pcie = pcie
        self._unsupported: set[str] = set()
        self._counters = Counters(facts.name, counting)
        self._now = nothing()
        self._read: dict[str, float] = {}  # group: when (monotonic seconds)
        self._twice: set[str] = set()  # buses that have a rate by now, if they ever will
        self._next_link = 0

    @property
    def totals(self) -> dict[str, int]:
        """Bytes counted since the driver was loaded, of what this GPU counts."""
        found = {key: self._counters.bytes(bus, key) for bus in _BUSES for key in _BUSES[bus][0]}
        return {key: count for key, count in found.items() if count is not None}

    def read_at(self, group: str) -> float:
        """When that group was read last, in monotonic seconds; -inf before that."""
        return self._read.get(group, -math.inf)

    def counts(self, bus: str) -> bool:
        """It has counters of this bus, or PCIe rates without; as far as is known yet."""
        counted = not self._unsupported.issuperset(_BUSES[bus][0])
        return counted or (bus == "pcie" and not self._now["unified"])

    def go_on_from(self, earlier: Gpu) -> None:
        """The same GPU under an earlier handle: its numbers continue without a gap."""
        self._unsupported, self._counters = earlier._unsupported, earlier._counters
        self._now, self._read, self._twice = earlier._now, earlier._read, earlier._twice
        self.links = earlier.links

    def lose(self) -> None:
        """It does not answer any more; what it counted is void."""
        self.lost = True
        self._counters.clear()
        self._now, self.links = nothing(), []
        self._read.clear()
        self._twice.clear()

    def wanted(self, tick: float, *, busy: bool, links: bool) -> dict[str, float]:
        """How often each group is worth reading, in seconds; `tick`: between two samples.

        busy: a run goes on, which may move something any time. links: somebody looks at them.
        """
        if self.lost:
            return {}
        wanted = {"state": tick, "load": max(tick, _LOAD_SECONDS)}
        if "energy" not in self._unsupported:
            wanted["energy"] = _ENERGY_SECONDS
        still = _STILL_BUSY_SECONDS if busy else _STILL_SECONDS
        for bus in filter(self.counts, _BUSES):
            wanted[bus] = max(tick, still) if bus in self._twice and not self._moves(bus) else tick
        if links and self.facts.nvlinks:
            wanted["links"] = _LINKS_SECONDS / -(-self.facts.nvlinks // _LINKS_AT_ONCE)
        return wanted

    def read(self, group: str, now: float) -> None:
        """Reads one group of wanted(); a GPU that does not answer is lost from then on."""
        readers: Mapping[str, Callable[[float], None]] = {
            "state": self._state,
            "load": self._load,
            "energy": self._energy,
            "links": self._links,
        }
        if self.lost:
            return
        try:
            if group in readers:
                readers[group](now)
            else:
                self._bus(group, now)
        except pynvml.NVMLError as error:
            if error.value not in LOST:
                raise
            self.lose()
            return
        if group in _BUSES and group not in self._read and self.counts(group):
            self._read[group] = -math.inf
        elif group != "links":
            self._read[group] = now
            self._twice.add(group)

    def sample(self, now: float, *, ram_used: int, ram_total: int) -> GpuSample:
        """What is known; all of it None once the GPU is lost. RAM in bytes, for unified memory."""
        sample = self._now.copy()
        read = [(group, at) for group, at in self._read.items() if at > -math.inf]
        sample["ages"] = {group: round(now - at, 2) for group, at in read}
        sample["lost"] = self.lost
        if sample["unified"]:
            sample["mem_used"], sample["mem_total"] = ram_used, ram_total
        return sample

    def _moves(self, bus: str) -> bool:
        rates = dict(self._now)
        return any(int(rates[key] or 0) > _MOVING for key in _BUSES[bus][0])  # type: ignore[call-overload]

    def _state(self, now: float) -> None:
        nvml, sample = self._nvml, self._now
        power = self._fields(_POWER).get("power")
        if power is None:
            power = self._ask("usage", nvml.nvmlDeviceGetPowerUsage)
        sample["power"] = _milli(power)
        clock = nvml.nvmlDeviceGetClockInfo
        sample["sm_clock"] = self._ask("sm", clock, pynvml.NVML_CLOCK_SM)
        sample["mem_clock"] = self._ask("mem", clock, pynvml.NVML_CLOCK_MEM)
        sensor = pynvml.NVML_TEMPERATURE_GPU
        sample["temp"] = self._ask("temp", nvml.nvmlDeviceGetTemperature, sensor)
        memory = self._ask("memory", nvml.nvmlDeviceGetMemoryInfo)
        told = memory is not None and memory.total > 0
        # GB10 has one memory for CPU and GPU, and NVML reports none
        sample["unified"] = not told and (memory is not None or "memory" in self._unsupported)
        sample["mem_used"] = int(memory.used) if told else None
        sample["mem_total"] = int(memory.total) if told else None

    def _load(self, now: float) -> None:
        nvml, sample = self._nvml, self._now
        rates = self._ask("util", nvml.nvmlDeviceGetUtilizationRates)
        sample["util"] = None if rates is None else int(rates.gpu)
        limit = self._ask("limit", nvml.nvmlDeviceGetEnforcedPowerLimit)
        sample["power_limit"] = _milli(limit)
        # boards without a sensor say 0
        sample["mem_temp"] = self._fields(_MEMORY_TEMP).get("mem_temp") or None
        mask = self._ask("throttle", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        held = None if mask is None else [name for bit, name in REASONS.items() if mask & bit]
        sample["throttle"] = held

    def _energy(self, now: float) -> None:
        self._now["energy"] = _milli(self._fields(_ENERGY).get("energy"))

    def _bus(self, bus: str, now: float) -> None:
        fields, unit = _BUSES[bus]
        if self._unsupported.issuperset(fields):
            if not self._now["unified"]:  # where PCIe has no meaning
                rates = self._pcie.rates(self.facts.uuid, self.handle)
                self._now["pcie_tx"], self._now["pcie_rx"] = rates
            return
        values = self._fields(fields)
        counts = {key: values[key] * unit if key in values else None for key in fields}
        self._now.update(self._counters.rates(bus, counts, now))  # type: ignore[typeddict-item]

    def _links(self, now: float) -> None:
        """The next few links; the others keep their rates until it is their turn."""
        count = self.facts.nvlinks
        places = range(self._next_link, min(count, self._next_link + _LINKS_AT_ONCE))
        self._next_link = places.stop % count
        ways = (("tx", _TX), ("rx", _RX))
        wanted = {f"{way}{place}": (id, place) for place in places for way, id in ways}
        values = self._fields(wanted)
        counts = {key: values[key] * _KIB if key in values else None for key in wanted}
        rates = self._counters.rates("nvlink", counts, now)
        links = self.links or [(None, None)] * count
        for place in places:
            links[place] = (rates[f"tx{place}"], rates[f"rx{place}"])
        self.links = links

    def _ask(self, key: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of one call; None, and never asked again, where it is not supported."""
        if key in self._unsupported:
            return None
        try:
            return call(self.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in LOST:
                raise
            if error.value in _UNSUPPORTED:
                self._unsupported.add(key)
            return None

    def _fields(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """The values of several fields in one call, those that this GPU reports."""
        keys = [key for key in wanted if key not in self._unsupported]
        if not keys:
            return {}
        ids = [wanted[key] for key in keys]
        values = self._ask("fields", self._nvml.nvmlDeviceGetFieldValues, ids)
        if "fields" in self._unsupported:
            self._unsupported.update(keys)
        found: dict[str, int] = {}
        for key, value in zip(keys, values or (), strict=values is not None):
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                found[key] = int(getattr(value.value, _VALUE[value.valueType]))
            elif value.nvmlReturn in _UNSUPPORTED:
                self._unsupported.add(key)
            elif value.nvmlReturn in LOST:
                raise pynvml.NVMLError(value.nvmlReturn)
        return found


def _milli(value: int | None) -> float | None:
    return None if value is None else round(value / 1000, 1)
