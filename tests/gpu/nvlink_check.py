"""Two real GPUs: do our NVLink bytes match a known copy? `python -m tests.gpu.nvlink_check`.

Copies a known number of bytes from GPU 0 to GPU 1 while telemetry samples at 10 Hz, and integrates
its rates. Prints one line of JSON; exits 1 if the bytes differ by 5 % or more, or if a number that
an H200 reports is missing. Also tells what sampling costs over the real driver.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import torch

from app.telemetry import Telemetry

CHUNK = 1 << 30
COPIES = 1500  # about 4 s at 400 GB/s
TOLERANCE = 0.05
SETTLE_SECONDS = 4.0  # a reading lies before the copy: links at rest are read every 2 s
COST_SECONDS = 11.0
LINKS_SECONDS = 12.0
LOOKED_SECONDS = 30.0  # after which nobody looks at the links
REPORTED = ("util", "power", "power_limit", "energy", "sm_clock", "mem_clock", "temp", "mem_temp")
REPORTED += ("mem_used", "mem_total", "throttle", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx")


class Silent:
    """A hub without a page."""

    readers = 0

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Nobody listens."""


def copy(source: int, target: int) -> int:
    """Copies over the link and waits; the bytes that were moved."""
    data = torch.ones(CHUNK, dtype=torch.uint8, device=f"cuda:{source}")
    into = torch.empty_like(data, device=f"cuda:{target}")
    for _ in range(COPIES):
        into.copy_(data)
    for device in (source, target):
        torch.cuda.synchronize(device)
    assert bool((into[:: CHUNK // 64] == 1).all())
    return CHUNK * COPIES


def integral(samples: list[dict[str, Any]], gpu: int, key: str) -> float:
    """Bytes: each rate that was read times the time since the reading before."""
    read = [sample for sample in samples if sample["gpus"][gpu]["ages"].get("nvlink") == 0]
    return sum(
        (after["gpus"][gpu][key] or 0) * (after["t"] - before["t"])
        for before, after in itertools.pairwise(read)
    )


def places(telemetry: Telemetry) -> tuple[int, int]:
    """Where torch's devices 0 and 1 are in the samples, matched by UUID."""
    uuids = [gpu["uuid"] for gpu in telemetry.info()["gpus"]]
    found = [uuids.index(f"GPU-{torch.cuda.get_device_properties(i).uuid}") for i in (0, 1)]
    return found[0], found[1]


def measured(telemetry: Telemetry) -> dict[str, Any]:
    """The copy as telemetry saw it."""
    with telemetry.benchmarking():
        time.sleep(SETTLE_SECONDS)
        began = time.time()
        moved = copy(0, 1)
        copy_seconds = time.time() - began
        time.sleep(SETTLE_SECONDS)
        samples: Any = telemetry.slice(began - SETTLE_SECONDS, time.time())
    sender, receiver = places(telemetry)
    return {
        "bytes_copied": moved,
        "gb_per_s": round(moved / copy_seconds / 1e9, 1),
        "samples": len(samples),
        "sent_ratio": round(integral(samples, sender, "nvlink_tx") / moved, 4),
        "received_ratio": round(integral(samples, receiver, "nvlink_rx") / moved, 4),
        "nvlink_readings": sum(s["gpus"][sender]["ages"].get("nvlink") == 0 for s in samples),
        "not_reported": [key for key in REPORTED if samples[-1]["gpus"][sender][key] is None],
        "newest": samples[-1]["gpus"][sender],
    }


def links_that_sent(telemetry: Telemetry) -> int:
    """NVLinks of the sender that moved while it copied and somebody looked at them."""
    sender, _ = places(telemetry)
    telemetry.links()
    time.sleep(LINKS_SECONDS)  # each is read once
    copy(0, 1)
    telemetry.links()
    time.sleep(LINKS_SECONDS)
    return sum((sent or 0) > 0 for sent, _ in telemetry.links()[sender])


def costs(telemetry: Telemetry) -> dict[str, float]:
    """Per cent of one core that the sampling thread takes, by rate, at rest and while it copies."""
    found = {}
    for hz in (1, 10):
        for name, wait in (("", time.sleep), (", copying", copy_for)):
            telemetry.set_rate(hz, 600)
            wait(COST_SECONDS)
            found[f"{hz} Hz{name}"] = round(100 * telemetry.cost, 3)
    return found


def copy_for(seconds: float) -> None:
    """Copies over the link for so long or a little longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        copy(0, 1)


def main() -> int:
    """Measures, prints, judges."""
    if torch.cuda.device_count() < 2:
        print(json.dumps({"ok": False, "reason": "this needs two GPUs"}))
        return 1
    copy(0, 1)  # the first one makes contexts and peer mappings
    with Telemetry(Silent()) as telemetry:
        while telemetry.latest() is None:
            time.sleep(0.1)
        info = telemetry.info()
        told = measured(telemetry)
        told["links_that_sent"] = links_that_sent(telemetry)
        time.sleep(LOOKED_SECONDS)
        told["percent_of_one_core"] = costs(telemetry)
        told["reading_ms"] = telemetry.info()["reading_ms"]
    told["topology"] = [[way["kind"] for way in row] for row in info["topology"]]
    told["gpus"] = [f"{gpu['name']}, {gpu['nvlinks']} NVLinks" for gpu in info["gpus"]]
    told["driver"] = info["driver"]
    ratios = (told["sent_ratio"], told["received_ratio"])
    told["within"] = all(abs(ratio - 1) < TOLERANCE for ratio in ratios)
    shares = told["percent_of_one_core"]
    told["cheap"] = max(shares["1 Hz"], shares["1 Hz, copying"]) < 1
    told["ok"] = told["within"] and told["cheap"] and not told["not_reported"]
    print(json.dumps(told))
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
