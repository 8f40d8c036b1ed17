"""What the sampling thread costs: `python -m tests.telemetry_cost` prints shares of one core.

With 8 made-up GPUs whose calls take the CPU time of H200s (tests/fake_nvml.py), and with this
machine's own driver, or none. Exits 1 if sampling takes 1 % of a core or more once a second, or
5 % ten times a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pynvml

from app.sampler import REST, WORK
from app.telemetry import Telemetry
from tests.fake_nvml import busy, costly, h200s

SECONDS = 11.0  # two of the thread's own measuring periods
LIMITS = {1: REST, 10: WORK}


class Listener:
    """A hub with one page, that encodes what it is sent as the real one does."""

    readers = 1

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        json.dumps(data, ensure_ascii=False, allow_nan=False)


def cost(nvml: Any, hz: float) -> float:
    """The share of one core that a Telemetry takes at this rate, which it must keep."""
    with Telemetry(Listener(), nvml=nvml, environment=os.environ) as watched:
        watched.set_rate(hz, 600)
        began = time.time()
        time.sleep(SECONDS)
        samples = len(watched.slice(began, time.time()))
        assert samples > 0.8 * hz * SECONDS, f"{samples} samples at {hz} Hz"
        print(hz, "Hz:", samples, "samples; ms per reading:", watched.info()["reading_ms"])
        return watched.cost


def main() -> int:
    """Measures each case in turn."""
    cases = {"8 GPUs": lambda: costly(busy(h200s(8))), "this machine": lambda: pynvml}
    found = {(name, hz): cost(make(), hz) for name, make in cases.items() for hz in LIMITS}
    within = all(share < LIMITS[hz] for (_, hz), share in found.items())
    told = {f"{name}, {hz} Hz": round(100 * share, 3) for (name, hz), share in found.items()}
    print(json.dumps({"percent_of_one_core": told, "under_1_and_5_percent": within}))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
