"""Power, clocks and heat of the GPU while a benchmark's subject has its turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from app.telemetry import Telemetry
from app.telemetry_ring import Sample


class Silent:
    """A hub that nobody reads."""

    readers = 0

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Nobody listens."""


@contextmanager
def turn(telemetry: Telemetry) -> Iterator[Callable[[], dict[str, Any]]]:
    """Samples at 10 Hz inside the block; the callable tells what the first GPU said so far."""
    began = time.time()

    def seen() -> dict[str, Any]:
        samples = [one for one in telemetry.slice(began, time.time()) if "gpus" in one]
        return told(samples, telemetry.info()["reason"])  # type: ignore[arg-type]

    with telemetry.benchmarking():
        yield seen


def told(samples: Sequence[Sample], reason: str) -> dict[str, Any]:
    """Lists of W, MHz and °C of the first GPU, and why it was throttled; or {"reason"}."""
    gpus = [sample["gpus"][0] for sample in samples if sample["gpus"]]
    power = [gpu["power"] for gpu in gpus if gpu["power"] is not None]
    clocks = [gpu["sm_clock"] for gpu in gpus if gpu["sm_clock"] is not None]
    heat = [gpu["temp"] for gpu in gpus if gpu["temp"] is not None]
    if not (power and clocks and heat):
        return {"reason": reason or "the turn was too short for a sample of the GPU"}
    throttled = {why for gpu in gpus for why in gpu["throttle"] or ()}
    return {
        "power_watts": power,
        "sm_clock_mhz": clocks,
        "temperature_c": heat,
        "throttled": sorted(throttled),
    }
