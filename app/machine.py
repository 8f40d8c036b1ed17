"""The machine as the planner sees it: GPUs, their memory, RAM, from the newest telemetry."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; bytes are None where the driver does not report them."""

    name: str
    compute: str  # "9.0"; "" if not reported
    total: int | None
    used: int | None
    unified: bool = False  # its memory is the RAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """gpus: in CUDA's order, those that CUDA sees; `reason` says why there are none.

    engine_loaded: our own engine holds memory now, which the next job gets or frees.
    """

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    driver: str = ""
    ram_total: int | None = None
    ram_used: int | None = None
    engine_loaded: bool = False

    @property
    def name(self) -> str:
        """What runs of this machine are recognised by: GPUs (or processor) and driver."""
        gpus = ", ".join(gpu.name for gpu in self.gpus)
        return f"{gpus or platform.processor() or platform.machine()} {self.driver}".strip()


def machine_of(
    info: Mapping[str, Any], sample: Mapping[str, Any] | None, *, engine_loaded: bool
) -> Machine:
    """From Telemetry.info() and Telemetry.latest()."""
    rows: Sequence[Mapping[str, Any]] = sample["gpus"] if sample else ()
    seen: list[tuple[int, Gpu]] = []
    for place, facts in enumerate(info["gpus"]):
        row = rows[place] if place < len(rows) else {}
        if facts["cuda"] is None or row.get("lost"):
            continue
        gpu = Gpu(
            name=facts["name"],
            compute=facts["compute"],
            total=row.get("mem_total"),
            used=row.get("mem_used"),
            unified=bool(row.get("unified")),
        )
        seen.append((facts["cuda"], gpu))
    return Machine(
        gpus=tuple(gpu for _, gpu in sorted(seen, key=lambda pair: pair[0])),
        reason=str(info["reason"] or ""),
        driver=str(info["driver"] or ""),
        ram_total=sample["ram_total"] if sample else None,
        ram_used=sample["ram_used"] if sample else None,
        engine_loaded=engine_loaded,
    )
