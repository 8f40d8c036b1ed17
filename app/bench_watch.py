"""Power, clocks and heat of the GPU while a benchmark's subject has its turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from app.telemetry import Telemetry
from app.telemetry_ring import Sample

_SENT, _RECEIVED = "nvlink_tx", "nvlink_rx"


class Silent:
    """A hub that nobody reads."""

    readers = 0

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Nobody listens."""


@contextmanager
def turn(telemetry: Telemetry) -> Iterator[Callable[[], dict[str, Any]]]:
    """Samples at 10 Hz inside the block; the callable tells what the first GPU said so far.

    And power and clock of each, and, where they count them, its bytes over NVLink.
    """

    def seen() -> dict[str, Any]:
        samples = [one for one in telemetry.slice(began, time.time()) if "gpus" in one]
        found = told(samples, telemetry.info()["reason"])  # type: ignore[arg-type]
        if links := moved(before, telemetry.totals_now()):
            found["nvlink_bytes"] = links
        return found

    with telemetry.benchmarking():
        before = telemetry.totals_now()
        began = time.time()
        yield seen


def moved(
    before: Sequence[Mapping[str, int]], after: Sequence[Mapping[str, int]]
) -> list[dict[str, int]]:
    """Bytes sent and received of each GPU between two readings; [] where one does not count."""
    pairs = list(zip(before, after, strict=False))
    keys = {"sent": _SENT, "received": _RECEIVED}
    if not pairs or not all(key in one for pair in pairs for one in pair for key in keys.values()):
        return []
    return [{name: new[key] - old[key] for name, key in keys.items()} for old, new in pairs]


def told(samples: Sequence[Sample], reason: str) -> dict[str, Any]:
    """Lists of W, MHz and °C of the first GPU, and why it was throttled; or {"reason"}.

    each: W and MHz of every GPU in its place, empty where it does not tell them.
    """
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
        "each": _each(samples),
    }


def _each(samples: Sequence[Sample]) -> list[dict[str, list[float]]]:
    # a GPU that is found late comes after those that were there
    of_each = zip(*(sample["gpus"] for sample in samples if sample["gpus"]), strict=False)
    return [
        {
            name: [one[key] for one in of_gpu if one[key] is not None]
            for name, key in (("power_watts", "power"), ("sm_clock_mhz", "sm_clock"))
        }
        for of_gpu in of_each
    ]
