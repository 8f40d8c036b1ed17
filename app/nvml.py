"""What NVML counts on each GPU, as rates and plain units; a lost or mute GPU stops no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import pynvml

from app.nvml_facts import GpuFacts, Link, cuda_order, gpu_facts, topology
from app.nvml_pcie import PcieThread

_LOST = frozenset(
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
_REASONS = {
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
_TX, _RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
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


@dataclass(slots=True, kw_only=True)
class _Gpu:
    handle: Any
    facts: GpuFacts
    lost: bool = False
    unsupported: set[str] = field(default_factory=set)
    counters: dict[str, tuple[float, int]] = field(default_factory=dict)  # when, value


class Gpus:
    """The GPUs that NVML shows, those CUDA numbers first; one thread at a time may use it."""

    def __init__(self, library: Any, environment: Mapping[str, str]) -> None:
        self._nvml = library
        self._environment = environment
        self._gpus: list[_Gpu] = []
        self._pcie = PcieThread(library)
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
    def incomplete(self) -> bool:
        """No driver, no GPU, or a lost one: open() may find it again."""
        return bool(self.reason) or any(gpu.lost for gpu in self._gpus)

    def open(self) -> None:
        """Finds the driver and the GPUs, and finds lost ones again; `reason` says what failed."""
        self.close()
        try:
            self._nvml.nvmlInit()
            self._open = True
            self.driver = str(self._nvml.nvmlSystemGetDriverVersion())
            version = self._nvml.nvmlSystemGetCudaDriverVersion_v2()
            self.cuda = f"{version // 1000}.{version % 1000 // 10}"
            found = list(self._devices())
        except pynvml.NVMLError as error:
            self.reason = _why(error)
            self._lose()
            return
        before = {gpu.facts.uuid: gpu for gpu in self._gpus}
        for gpu in found:  # the others go on counting where they were
            if (known := before.pop(gpu.facts.uuid, None)) is not None and not known.lost:
                gpu.counters, gpu.unsupported = known.counters, known.unsupported
        for gpu in before.values():
            gpu.lost = True
        self._gpus = _in_cuda_order([*found, *before.values()], self._environment)
        self.reason = "" if self._gpus else "the NVIDIA driver shows no GPU"
        alive = [None if gpu.lost else gpu.handle for gpu in self._gpus]
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

    def read(
        self, now: float, *, ram_used: int, ram_total: int, each_link: bool
    ) -> list[GpuSample]:
        """One sample per GPU; `now` in monotonic seconds, RAM in bytes for unified memory."""
        return [self._read(gpu, now, ram_used, ram_total, each_link) for gpu in self._gpus]

    def _devices(self) -> Iterator[_Gpu]:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                yield _Gpu(handle=handle, facts=gpu_facts(self._nvml, handle, index))
            except pynvml.NVMLError as error:
                if error.value not in _LOST:
                    raise

    def _lose(self) -> None:
        for gpu in self._gpus:
            gpu.lost = True
            gpu.counters.clear()

    def _read(
        self, gpu: _Gpu, now: float, ram_used: int, ram_total: int, each_link: bool
    ) -> GpuSample:
        if gpu.lost:
            return _nothing(lost=True)
        try:
            return self._sample(gpu, now, ram_used, ram_total, each_link)
        except pynvml.NVMLError as error:
            if error.value not in _LOST:
                raise
            gpu.lost = True
            gpu.counters.clear()
            return _nothing(lost=True)

    def _sample(
        self, gpu: _Gpu, now: float, ram_used: int, ram_total: int, each_link: bool
    ) -> GpuSample:
        nvml, sample = self._nvml, _nothing(lost=False)
        fields = self._fields(gpu, _FIELDS)
        rates = self._ask(gpu, "util", nvml.nvmlDeviceGetUtilizationRates)
        sample["util"] = None if rates is None else int(rates.gpu)
        self._memory(gpu, sample, ram_used, ram_total)
        sample["power"] = _milli(fields.get("power"))
        if sample["power"] is None:
            sample["power"] = _milli(self._ask(gpu, "usage", nvml.nvmlDeviceGetPowerUsage))
        sample["power_limit"] = _milli(fields.get("power_limit"))
        if sample["power_limit"] is None:
            limit = self._ask(gpu, "limit", nvml.nvmlDeviceGetEnforcedPowerLimit)
            sample["power_limit"] = _milli(limit)
        sample["energy"] = _milli(fields.get("energy"))
        clock = nvml.nvmlDeviceGetClockInfo
        sample["sm_clock"] = self._ask(gpu, "sm", clock, pynvml.NVML_CLOCK_SM)
        sample["mem_clock"] = self._ask(gpu, "mem", clock, pynvml.NVML_CLOCK_MEM)
        sensor = pynvml.NVML_TEMPERATURE_GPU
        sample["temp"] = self._ask(gpu, "temp", nvml.nvmlDeviceGetTemperature, sensor)
        sample["mem_temp"] = fields.get("mem_temp") or None  # boards without a sensor say 0
        mask = self._ask(gpu, "throttle", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        if mask is not None:
            sample["throttle"] = [name for bit, name in _REASONS.items() if mask & bit]
        self._pcie_rates(gpu, sample, fields, now)
        for way in ("tx", "rx"):
            rate = _rate(gpu, f"nvlink_{way}", fields.get(f"nvlink_{way}"), _KIB, now)
            sample["nvlink_tx" if way == "tx" else "nvlink_rx"] = rate
        if each_link and "nvlink_tx" in fields:
            sample["links"] = self._links(gpu, now)
        return sample

    def _memory(self, gpu: _Gpu, sample: GpuSample, ram_used: int, ram_total: int) -> None:
        memory = self._ask(gpu, "memory", self._nvml.nvmlDeviceGetMemoryInfo)
        if memory is not None and memory.total:
            sample["mem_used"], sample["mem_total"] = int(memory.used), int(memory.total)
        elif memory is not None or "memory" in gpu.unsupported:  # GB10: one memory for both
            sample["unified"] = True
            sample["mem_used"], sample["mem_total"] = ram_used, ram_total

    def _pcie_rates(
        self, gpu: _Gpu, sample: GpuSample, fields: Mapping[str, int], now: float
    ) -> None:
        if "fields" not in gpu.unsupported and not {"pcie_tx", "pcie_rx"} <= gpu.unsupported:
            sample["pcie_tx"] = _rate(gpu, "pcie_tx", fields.get("pcie_tx"), 1, now)
            sample["pcie_rx"] = _rate(gpu, "pcie_rx", fields.get("pcie_rx"), 1, now)
        elif not sample["unified"]:
            sample["pcie_tx"], sample["pcie_rx"] = self._pcie.rates(gpu.facts.uuid, gpu.handle)

    def _links(self, gpu: _Gpu, now: float) -> list[list[int | None]] | None:
        wanted = {
            f"{way}{link}": (number, link)
            for link in range(gpu.facts.nvlinks)
            for way, number in (("tx", _TX), ("rx", _RX))
        }
        values = self._fields(gpu, wanted)
        rates = [
            [_rate(gpu, f"{way}{link}", values.get(f"{way}{link}"), _KIB, now) for way in ("tx", "rx")]
            for link in range(gpu.facts.nvlinks)
        ]
        return rates or None

    def _ask(self, gpu: _Gpu, key: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of one call; None, and never asked again, where it is not supported."""
        if key in gpu.unsupported:
            return None
        try:
            return call(gpu.handle, *arguments)
        except pynvml.NVMLError as error:
            if error.value in _LOST:
                raise
            if error.value in _UNSUPPORTED:
                gpu.unsupported.add(key)
            return None

    def _fields(self, gpu: _Gpu, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """The values of several fields in one call, those that this GPU reports."""
        keys = [key for key in wanted if key not in gpu.unsupported]
        if not keys:
            return {}
        call = self._nvml.nvmlDeviceGetFieldValues
        values = self._ask(gpu, "fields", call, [wanted[key] for key in keys])
        found: dict[str, int] = {}
        for key, value in zip(keys, () if values is None else values, strict=False):
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                found[key] = int(getattr(value.value, _VALUE[value.valueType]))
            elif value.nvmlReturn in _UNSUPPORTED:
                gpu.unsupported.add(key)
            elif value.nvmlReturn in _LOST:
                raise pynvml.NVMLError(value.nvmlReturn)
        return found


def _rate(gpu: _Gpu, key: str, count: int | None, unit: int, now: float) -> int | None:
    """Units per second since the last reading; None at the first, after a reset, and at zero.

    Some hosts count nothing and say 0 (DCGM issue 149): a counter that never moved is no report.
    """
    before = gpu.counters.get(key)
    if count is None:
        gpu.counters.pop(key, None)
        return None
    gpu.counters[key] = (now, count)
    if before is None or count < before[1] or count == 0 or now <= before[0]:
        return None
    return round((count - before[1]) * unit / (now - before[0]))


def _in_cuda_order(gpus: list[_Gpu], environment: Mapping[str, str]) -> list[_Gpu]:
    gpus = sorted(gpus, key=lambda gpu: gpu.facts.nvml_index)
    ordered = cuda_order([gpu.facts for gpu in gpus], environment)
    for gpu, facts in zip(gpus, ordered, strict=True):
        gpu.facts = facts
    last = len(gpus)
    return sorted(gpus, key=lambda gpu: last if gpu.facts.cuda is None else gpu.facts.cuda)


def _milli(value: int | None) -> float | None:
    return None if value is None else round(value / 1000, 1)


def _why(error: pynvml.NVMLError) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "this machine has no NVIDIA driver (libnvidia-ml.so.1 was not found)"
    return f"the NVIDIA driver does not answer ({error})"


def _nothing(*, lost: bool) -> GpuSample:
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
        lost=lost,
    )
