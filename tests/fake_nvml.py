"""A driver that is not there: the part of pynvml that telemetry calls, over made-up GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
from pynvml import NVMLError

GIB = 1 << 30
LINK = 18  # NVLinks of an H200
_COUNTERS = {138: "nvlink_tx", 139: "nvlink_rx", 197: "pcie_tx", 198: "pcie_rx"}
_SCALARS = {186: "power", 190: "power_limit", 82: "mem_temp", 83: "energy"}
# CPU milliseconds as measured on a pair of H200, driver 580.159.04; the rest are next to nothing.
H200_COSTS = {
    "field 138": 1.44,  # all links, with or without field 139
    "field 139": 0.0,
    "link": 0.87,  # either field of one link
    "field 197": 0.20,
    "field 198": 0.19,
    "field 186": 0.0055,
    "field 83": 4.3,
    "field 82": 0.055,
    "nvmlDeviceGetUtilizationRates": 0.26,
    "nvmlDeviceGetMemoryInfo": 0.011,
    "nvmlDeviceGetPowerUsage": 0.004,
    "nvmlDeviceGetEnforcedPowerLimit": 0.003,
    "nvmlDeviceGetClockInfo": 0.026,  # 0.048 and 0.003
    "nvmlDeviceGetTemperature": 0.004,
    "nvmlDeviceGetCurrentClocksEventReasons": 0.11,
    "nvmlDeviceGetPcieThroughput": 0.9,
}


@dataclass(slots=True, kw_only=True)
class FakeGpu:
    """One made-up GPU. Counters are what the fields would hold: KiB for NVLink, bytes for PCIe."""

    index: int
    name: str = "NVIDIA H200"
    links: int = LINK
    unsupported: set[str] = field(default_factory=set)  # call names, and "field 138"
    lost: bool = False
    gone: bool = False  # also from the list of devices
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS.values(), 0))
    util: int = 0
    used: int = 4 * GIB
    total: int = 141 * GIB
    power: int = 96_000
    power_limit: int = 700_000
    temp: int = 34
    mem_temp: int = 41
    sm_clock: int = 345
    mem_clock: int = 3201
    energy: int = 5_000_000
    throttle: int = 1  # idle

    @property
    def uuid(self) -> str:
        return f"GPU-{self.index:08d}-0000-4000-8000-000000000000"

    @property
    def bus(self) -> str:
        return f"00000000:{16 * self.index + 1:02X}:00.0"


class FakeNvml:
    """Stands in for the module `pynvml`; handles are the FakeGpus themselves."""

    def __init__(self, gpus: Sequence[FakeGpu] = (), *, driver: bool = True) -> None:
        self.gpus = list(gpus)
        self.driver = driver
        self.opened = 0  # nvmlInit less nvmlShutdown
        self.calls: list[str] = []
        self.before_read: Callable[[], None] = lambda: None  # moves the made-up world
        self.spend: Callable[[float], None] = lambda seconds: None  # what a call costs, H200_COSTS

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.82.07"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return 13000

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._present())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        gpu = self._present()[index]
        if gpu.lost:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, ids: list[tuple[int, int]]) -> Any:  # noqa: N802
        self._check(gpu, "nvmlDeviceGetFieldValues")
        if gpu.index == 0:
            self.before_read()
        values = (pynvml.c_nvmlFieldValue_t * len(ids))()  # the binding's own cost
        for value, (id, scope) in zip(values, ids, strict=True):
            (value.fieldId, value.scopeId) = (id, scope)
            number = self._field(gpu, id, scope)
            one_link = id in (138, 139) and scope != 0xFFFFFFFF
            self.spend(H200_COSTS.get("link" if one_link else f"field {id}", 0.0) / 1000)
            if number is None:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            elif id == 82:
                value.valueType, value.value.uiVal = 1, number
            else:
                value.valueType, value.value.ullVal = 3, number
        return values

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every call of one GPU, by its row in _ANSWERS."""
        answer = _ANSWERS[name]

        def call(gpu: FakeGpu, *arguments: Any) -> Any:
            self._check(gpu, name)
            self.spend(H200_COSTS.get(name, 0.0) / 1000)
            return answer(gpu, *arguments)

        return call

    def _present(self) -> list[FakeGpu]:
        return [gpu for gpu in self.gpus if not gpu.gone]

    def _check(self, gpu: FakeGpu, name: str) -> None:
        self.calls.append(name)
        del self.calls[:-4000]
        if gpu.lost or gpu.gone:
            raise NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if name in gpu.unsupported or (
            "*" in gpu.unsupported and name not in ("nvmlDeviceGetUUID", "nvmlDeviceGetName")
        ):
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _field(self, gpu: FakeGpu, id: int, scope: int) -> int | None:
        if f"field {id}" in gpu.unsupported:
            return None
        if id in _SCALARS:
            return int(getattr(gpu, _SCALARS[id]))
        count = gpu.counters[_COUNTERS[id]]
        if id in (138, 139):
            if not gpu.links:
                return None
            return count if scope == 0xFFFFFFFF else count // gpu.links
        return count


def _link_state(gpu: FakeGpu, link: int) -> int:
    if link >= gpu.links:
        raise NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    return 1


def _throughput(gpu: FakeGpu, way: int) -> int:
    time.sleep(0.02)  # as the real one blocks
    return 2000 + way


_ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetName": lambda gpu: gpu.name,
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=gpu.bus.encode()),
    "nvmlDeviceGetCudaComputeCapability": lambda gpu: (9, 0),
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
    "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.util, memory=0),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu.total, used=gpu.used),
    "nvmlDeviceGetPowerUsage": lambda gpu: gpu.power,
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: gpu.power_limit,
    "nvmlDeviceGetClockInfo": lambda gpu, kind: gpu.sm_clock if kind == 1 else gpu.mem_clock,
    "nvmlDeviceGetTemperature": lambda gpu, sensor: gpu.temp,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: gpu.throttle,
    "nvmlDeviceGetNvLinkState": _link_state,
    "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, link: pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
    "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(busId=b"0:05:00.0"),
    "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 30 if a.index // 4 == b.index // 4 else 50,
    "nvmlDeviceGetP2PStatus": lambda a, b, capability: 0,
    "nvmlDeviceGetPcieThroughput": _throughput,
}


def h200s(count: int) -> FakeNvml:
    """`count` GPUs around an NVSwitch, at rest."""
    return FakeNvml([FakeGpu(index=index) for index in range(count)])


def costly(nvml: FakeNvml) -> FakeNvml:
    """The same, with calls that take the CPU time of the real ones."""

    def spend(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    nvml.spend = spend
    return nvml


def busy(nvml: FakeNvml) -> FakeNvml:
    """The same, working in waves so that a plot has something to show."""
    start = time.monotonic()
    last = [start]

    def move() -> None:
        now = time.monotonic()
        step, last[0] = now - last[0], now
        for gpu in nvml.gpus:
            load = 0.5 + 0.5 * math.tanh(6 * math.sin((now - start) / 7 - gpu.index / 5))
            ripple = 0.5 + 0.5 * math.sin(now * 1.7 + gpu.index)
            gpu.util = round(98 * load)
            gpu.power = round(96_000 + load * (520_000 + 40_000 * ripple))
            gpu.temp = round(34 + 30 * load + gpu.index * 0.6)
            gpu.mem_temp = gpu.temp + 9
            gpu.sm_clock = 345 if load < 0.1 else round(1980 - 120 * load * ripple)
            gpu.used = round((20 + 70 * load + 2 * gpu.index) * GIB)
            gpu.energy += round(gpu.power * step)
            gpu.throttle = pynvml.nvmlClocksEventReasonSwPowerCap if load * ripple > 0.95 else 0
            for way in ("nvlink_tx", "nvlink_rx"):
                gpu.counters[way] += round(step * load * (0.6 + 0.4 * ripple) * 210 * (1 << 20))
            gpu.counters["pcie_tx"] += round(step * (0.02 + 0.4 * ripple * (1 - load)) * GIB)
            gpu.counters["pcie_rx"] += round(step * (0.05 + 18 * (1 - load) * ripple) * GIB)

    nvml.before_read = move
    return nvml
