"""One GPU's readings in plain units; what it cannot tell is None and is not asked for again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import pynvml

from app.nvml_facts import GpuFacts
from app.nvml_pcie import PcieThread

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
REASONS = {
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "application clocks",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clocks",
}  # an idle GPU (0x1) is not throttled
_ALL_LINKS = 0xFFFFFFFF  # scope 0 would be link 0 alone
_KIB = 1024
_TX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
_FIELDS: Mapping[str, tuple[int, int]] = {  # our name: NVML field id and scope
    "power": (pynvml.NVML_FI_DEV_POWER_INSTANT, 0),
    "power_limit": (pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT, 0),
    "mem_temp": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0),
    "energy": (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0),
    "pcie_tx": (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0),
    "pcie_rx": (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0),
    "nvlink_tx": (_TX, _ALL_LINKS),
    "nvlink_rx": (_RX, _ALL_LINKS),
}
# c_nvmlValue_t's member by valueType; nvmlValueType_t
_VALUE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class GpuSample(TypedDict):
    """One GPU at one moment: %, bytes, W, MHz, °C, bytes/s, J; None is "not reported".

    `links`: bytes/s sent and received of each NVLink, about once a second, else None.
    """

    util: int | None
    mem_used: int | None
    mem_total: int | None
    unified: bool
    power: float | None
    power_limit: float | None
    energy: float | None
    sm_clock: int | None
    mem_clock: int | None
    temp: int | None
    mem_temp: int | None
    throttle: list[str] | None
    pcie_tx: int | None
    pcie_rx: int | None
    nvlink_tx: int | None
    nvlink_rx: int | None
    links: list[list[int | None]] | None
    lost: bool


class Gpu:
    """A GPU under its NVML handle, what it does not support, and its counters so far."""

    def __init__(self, nvml: Any, handle: Any, facts: GpuFacts, pcie: PcieThread) -> None:
        self.handle = handle
        self.facts = facts
        self.lost = False
        self._nvml = nvml
        self._pcie = pcie
        self._unsupported: set[str] = set()
        self._counters: dict[str, tuple[float, int]] = {}  # when (monotonic seconds), value

    @property
    def totals(self) -> dict[str, int]:
        """Bytes counted since the driver was loaded, of what this GPU counts."""
        units = {"pcie_tx": 1, "pcie_rx": 1, "nvlink_tx": _KIB, "nvlink_rx": _KIB}
        counters = {key: self._counters.get(key) for key in units}
        return {key: at[1] * units[key] for key, at in counters.items() if at and at[1]}

    def go_on_from(self, earlier: Gpu) -> None:
        """The same GPU under an earlier handle: its rates continue without a gap."""
        self._unsupported, self._counters = earlier._unsupported, earlier._counters

    def lose(self) -> None:
        """It does not answer any more; what it counted is void."""
        self.lost = True
        self._counters.clear()

    def read(self, now: float, *, ram_used: int, ram_total: int, each_link: bool) -> GpuSample:
        """One sample; all of it None once the GPU is lost."""
        sample = _nothing()
        if not self.lost:
            try:
                self._fill(sample, now, each_link)
                self._memory(sample, ram_used, ram_total)
            except pynvml.NVMLError as error:
                if error.value not in LOST:
                    raise
                self.lose()
                sample = _nothing()
        sample["lost"] = self.lost
        return sample

    def _fill(self, sample: GpuSample, now: float, each_link: bool) -> None:
        nvml, fields = self._nvml, self._fields(_FIELDS)
        rates = self._ask("util", nvml.nvmlDeviceGetUtilizationRates)
        sample["util"] = None if rates is None else int(rates.gpu)
        power, limit = fields.get("power"), fields.get("power_limit")
        if power is None:
            power = self._ask("usage", nvml.nvmlDeviceGetPowerUsage)
        if limit is None:
            limit = self._ask("limit", nvml.nvmlDeviceGetEnforcedPowerLimit)
        sample["power"], sample["power_limit"] = _milli(power), _milli(limit)
        sample["energy"] = _milli(fields.get("energy"))
        clock = nvml.nvmlDeviceGetClockInfo
        sample["sm_clock"] = self._ask("sm", clock, pynvml.NVML_CLOCK_SM)
        sample["mem_clock"] = self._ask("mem", clock, pynvml.NVML_CLOCK_MEM)
        sensor = pynvml.NVML_TEMPERATURE_GPU
        sample["temp"] = self._ask("temp", nvml.nvmlDeviceGetTemperature, sensor)
        sample["mem_temp"] = fields.get("mem_temp") or None  # boards without a sensor say 0
        mask = self._ask("throttle", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if mask is not None:
            sample["throttle"] = [name for bit, name in REASONS.items() if mask & bit]
        sample["pcie_tx"] = self._rate("pcie_tx", fields.get("pcie_tx"), 1, now)
        sample["pcie_rx"] = self._rate("pcie_rx", fields.get("pcie_rx"), 1, now)
        sample["nvlink_tx"] = self._rate("nvlink_tx", fields.get("nvlink_tx"), _KIB, now)
        sample["nvlink_rx"] = self._rate("nvlink_rx", fields.get("nvlink_rx"), _KIB, now)
        if each_link and self.facts.nvlinks:
            sample["links"] = self._links(now)

    def _memory(self, sample: GpuSample, ram_used: int, ram_total: int) -> None:
        """GB10 has one memory for CPU and GPU, and NVML reports none; PCIe has no meaning there."""
        memory = self._ask("memory", self._nvml.nvmlDeviceGetMemoryInfo)
        if memory is not None and memory.total:
            sample["mem_used"], sample["mem_total"] = int(memory.used), int(memory.total)
        elif memory is not None or "memory" in self._unsupported:
            sample["unified"] = True
            sample["mem_used"], sample["mem_total"] = ram_used, ram_total
        counted = not {"pcie_tx", "pcie_rx"} <= self._unsupported
        if not counted and not sample["unified"]:
            sample["pcie_tx"], sample["pcie_rx"] = self._pcie.rates(self.facts.uuid, self.handle)

    def _links(self, now: float) -> list[list[int | None]]:
        ways = (("tx", _TX), ("rx", _RX))
        places = range(self.facts.nvlinks)
        wanted = {f"{way}{place}": (id, place) for place in places for way, id in ways}
        values = self._fields(wanted)

        def rate(key: str) -> int | None:
            return self._rate(key, values.get(key), _KIB, now)

        return [[rate(f"tx{place}"), rate(f"rx{place}")] for place in places]

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

    def _rate(self, key: str, count: int | None, unit: int, now: float) -> int | None:
        """Bytes/s since the last reading; None at the first, after a reset, and at zero.

        Some hosts count nothing and say 0 (DCGM issue 149): what never moved is not reported.
        """
        if count is None:
            self._counters.pop(key, None)
            return None
        before = self._counters.get(key)
        self._counters[key] = (now, count)
        if before is None or count < before[1] or count == 0 or now <= before[0]:
            return None
        return round((count - before[1]) * unit / (now - before[0]))


def _milli(value: int | None) -> float | None:
    return None if value is None else round(value / 1000, 1)


def _nothing() -> GpuSample:
    return GpuSample(
        util=None,
        mem_used=None,
        mem_total=None,
        unified=False,
        power=None,
        power_limit=None,
        energy=None,
        sm_clock=None,
        mem_clock=None,
        temp=None,
        mem_temp=None,
        throttle=None,
        pcie_tx=None,
        pcie_rx=None,
        nvlink_tx=None,
        nvlink_rx=None,
        links=None,
        lost=False,
    )
