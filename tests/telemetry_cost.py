"""What the sampling thread costs: `python -m tests.telemetry_cost` prints shares of one core.

With 8 made-up GPUs (the binding's own ctypes work included, the driver's not) and with this
machine's own driver, or none. Exits 1 if sampling once a second takes 1 % of a core or more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pynvml

from app.telemetry import Telemetry
from tests.fake_nvml import busy, h200s

SECONDS = 11.0  # two of the thread's own measuring periods
LIMIT = 0.01


class Listener:
    """A hub with one page, that encodes what it is sent as the real one does."""

    readers = 1

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        json.dumps(data, ensure_ascii=False, allow_nan=False)


def cost(nvml: Any, hz: float) -> float:
    """The share of one core that a Telemetry takes at this rate."""
    with Telemetry(Listener(), nvml=nvml, environment=os.environ) as watched:
        watched.set_rate(hz, 600)
        time.sleep(SECONDS)
        return watched.cost


def main() -> int:
    """Measures each case in turn."""
    cases = {"8 GPUs": lambda: busy(h200s(8)), "this machine": lambda: pynvml}
    found = {
        f"{name}, {hz} Hz": round(100 * cost(make(), hz), 3)
        for name, make in cases.items()
        for hz in (1, 10)
    }
    within = all(share < 100 * LIMIT for name, share in found.items() if name.endswith(" 1 Hz"))
    print(json.dumps({"percent_of_one_core": found, "under_1_percent_at_1_hz": within}))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
