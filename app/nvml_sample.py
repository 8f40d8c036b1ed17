"""One GPU at one moment, in plain units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import pynvml

REASONS: Mapping[int, str] = {
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "application clocks",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "software thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clocks",
}  # an idle GPU (0x1) is not throttled


class GpuSample(TypedDict):
    """One GPU at one moment: %, bytes, W, MHz, °C, bytes/s, J; None is "not reported".

    `ages`: seconds since each group of numbers was read, 0 if for this sample; until the next
    reading they stay as they were. A rate is that of the time between its last two readings. What
    was not read yet is None and has no age: "state" (power, memory, clocks, temp), "load" (util,
    throttle, mem_temp, power_limit), "pcie", "nvlink", "energy".
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
    ages: dict[str, float]
    lost: bool


def nothing() -> GpuSample:
    """What is known of a GPU before it was read, and once it is lost."""
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
        ages={},
        lost=False,
    )
