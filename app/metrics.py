"""The console's numbers in Prometheus' text format 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import psutil

from app import records
from app.console import Console
from app.jobs import Kind, State
from app.live import EngineState
from app.nvml_sample import REASONS
from app.timing import seconds_by_stage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_DIRECTIONS = {"tx": "transmit", "rx": "receive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric: its samples are (labels, value); a value None is left out."""

    name: str
    help: str
    type: str = "gauge"
    samples: list[tuple[Mapping[str, str], float | None]] = field(default_factory=list)

    def add(self, labels: Mapping[str, str], value: float | None) -> None:
        """One more sample; a label set may come once."""
        self.samples.append((labels, value))


def render(console: Console) -> str:
    """The whole page; families without a sample are left out."""
    families = [*_gpus(console), *_host(console), *_work(console), *_process(console)]
    return "".join(_text(family) for family in families)


def _gpus(console: Console) -> Iterable[Family]:
    info, sample = console.telemetry.info(), console.telemetry.latest()
    about = Family(name="h3_gpu_info", help="Constant 1 with the GPU's name, UUID and driver.")
    up = Family(name="h3_gpu_up", help="Whether the GPU answers (0: lost).")
    throttled = Family(name="h3_gpu_throttled", help="Whether clocks are held down, by reason.")
    gauges = {key: Family(name=name, help=help) for key, (name, help, _) in _GAUGES.items()}
    energy = Family(
        name="h3_gpu_energy_joules_total",
        help="Energy used since the driver was loaded.",
        type="counter",
    )
    for facts, gpu in zip(info["gpus"], sample["gpus"] if sample else (), strict=False):
        one = {"gpu": facts["uuid"]}
        number = "" if facts["cuda"] is None else str(facts["cuda"])
        more = {"name": facts["name"], "cuda": number, "driver": info["driver"]}
        about.add({**one, **more}, 1)
        up.add(one, 0 if gpu["lost"] else 1)
        for reason in REASONS.values():
            held = gpu["throttle"]
            throttled.add({**one, "reason": reason}, None if held is None else reason in held)
        for key, family in gauges.items():
            value = dict(gpu)[key]
            family.add(one, None if value is None else float(str(value)) * _GAUGES[key][2])
        energy.add(one, gpu["energy"])
    return (about, up, *gauges.values(), throttled, energy, *_totals(console, info))


_GAUGES: Mapping[str, tuple[str, str, float]] = {  # field of a sample: name, help, factor
    "util": ("h3_gpu_utilization_ratio", "Time in which a kernel ran, 0 to 1.", 0.01),
    "power": ("h3_gpu_power_watts", "Power drawn.", 1),
    "power_limit": ("h3_gpu_power_limit_watts", "Power limit in force.", 1),
    "sm_clock": ("h3_gpu_sm_clock_hertz", "Clock of the multiprocessors.", 1e6),
    "mem_clock": ("h3_gpu_memory_clock_hertz", "Clock of the memory.", 1e6),
    "temp": ("h3_gpu_temperature_celsius", "Temperature of the GPU.", 1),
    "mem_temp": ("h3_gpu_memory_temperature_celsius", "Temperature of the memory.", 1),
    "mem_used": ("h3_gpu_memory_used_bytes", "Memory in use; unified memory: of the host.", 1),
    "mem_total": ("h3_gpu_memory_total_bytes", "Memory there is.", 1),
}


def _totals(console: Console, info: Mapping[str, Any]) -> Iterable[Family]:
    for bus, name in (("pcie", "PCIe"), ("nvlink", "NVLink")):
        family = Family(
            name=f"h3_gpu_{bus}_bytes_total",
            help=f"Bytes over {name} since the driver was loaded.",
            type="counter",
        )
        for facts, totals in zip(info["gpus"], console.telemetry.totals(), strict=False):
            for way, direction in _DIRECTIONS.items():
                labels = {"gpu": facts["uuid"], "direction": direction}
                family.add(labels, totals.get(f"{bus}_{way}"))
        yield family


def _host(console: Console) -> Iterable[Family]:
    sample = console.telemetry.latest()
    if sample is None:
        return
    yield _one("h3_host_cpu_ratio", "CPU time in use over all cores, 0 to 1.", sample["cpu"] / 100)
    yield _one("h3_host_memory_used_bytes", "RAM in use.", sample["ram_used"])
    yield _one("h3_host_memory_total_bytes", "RAM there is.", sample["ram_total"])


def _work(console: Console) -> Iterable[Family]:
    counts = console.jobs.counts()
    jobs = Family(name="h3_jobs", help="Jobs by kind and state.")
    for kind in get_args(Kind):
        for state in get_args(State):
            jobs.add({"kind": kind, "state": state}, counts.get((kind, state), 0))
    yield jobs
    yield _one("h3_queue_length", "Jobs that wait.", console.jobs.waiting())
    yield _one("h3_queue_paused", "Whether the queue is paused.", console.jobs.paused)
    engine = Family(name="h3_engine_state", help="1 for the state that the engine is in.")
    now = console.session.engine_state().state
    for name in get_args(EngineState):
        engine.add({"state": name}, name == now)
    yield engine
    yield from _last_run(console)


def _last_run(console: Console) -> Iterable[Family]:
    last = console.jobs.list(states=("done",), kinds=("generate",), limit=1)
    folder = records.inside(console.root, last[0].id) if last else None
    record = records.finished(folder) if folder else None
    if record is None:
        return
    stages = Family(name="h3_last_run_stage_seconds", help="Stages of the last run that was done.")
    for stage, seconds in seconds_by_stage(records.stage_times(record)).items():
        stages.add({"stage": stage}, seconds)
    yield stages
    yield _one("h3_last_run_end_timestamp_seconds", "When that run ended.", last[0].ended)


def _process(console: Console) -> Iterable[Family]:
    process = psutil.Process()
    times = process.cpu_times()
    yield _one("process_resident_memory_bytes", "Resident memory.", process.memory_info().rss)
    yield _one("process_start_time_seconds", "When the console began.", process.create_time())
    seconds = times.user + times.system
    yield _one("process_cpu_seconds_total", "CPU time of the console.", seconds, type="counter")
    cost = console.telemetry.cost
    yield _one("h3_telemetry_cpu_ratio", "Share of one core that telemetry takes.", cost)
    yield _one("h3_pages", "Event streams that are open.", console.hub.readers)


def _one(name: str, help: str, value: float, *, type: str = "gauge") -> Family:
    return Family(name=name, help=help, type=type, samples=[({}, value)])


def _text(family: Family) -> str:
    return "\n".join([*_lines(family), ""]) if any(v is not None for _, v in family.samples) else ""


def _lines(family: Family) -> Iterator[str]:
    help = family.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {family.name} {help}"
    yield f"# TYPE {family.name} {family.type}"
    for labels, value in family.samples:
        if value is not None:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            yield (
                f"{family.name}{{{pairs}}} {float(value):.15g}"
                if pairs
                else (f"{family.name} {float(value):.15g}")
            )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
