"""A benchmark: subjects take turns A B A B, nothing runs beside a turn; medians of their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from app.timing import KERNELS

Told = Mapping[str, Any]  # what one turn told: runtime.bench.base.Turn as JSON

_DECODES = ("video VAE decode", "audio VAE decode")
_WAITING = "communication"  # of KERNELS
Watch = Callable[[], AbstractContextManager[Callable[[], dict[str, Any]]]]


class Subject(Protocol):
    """app.bench_child.Child, as far as it is needed here."""

    name: str

    def load(self) -> dict[str, Any]: ...
    def ask(self, command: str) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One subject: what it loaded, its turns after the warm-up, and the GPU during each.

    rows: S of H3; what another family has in its place is its bench's own.
    """

    name: str
    facts: dict[str, Any]
    rows: Any
    warm_up: Told
    turns: tuple[Told, ...]
    gpu: tuple[dict[str, Any], ...]
    profile: dict[str, Any] | None


def rows_and_step(told: Told) -> str:
    """A turn of H3 in words."""
    return f"{told['rows']:,} rows, {statistics.median(told['steps']):.4f} s a step"


def same_rows(subjects: Sequence[Subject], warm: Sequence[Told]) -> None:
    """A ratio between different numbers of rows means nothing."""
    if len({told["rows"] for told in warm}) > 1:
        said = " and ".join(f"{s.name} {t['rows']:,}" for s, t in zip(subjects, warm, strict=True))
        raise ValueError(f"the subjects pack different numbers of rows ({said}); nothing compares")


def measure(
    subjects: Sequence[Subject],
    *,
    runs: int,
    profile: bool,
    watch: Watch,
    say: Callable[[str], None],
    words: Callable[[Told], str] = rows_and_step,
    check: Callable[[Sequence[Subject], Sequence[Told]], None] = same_rows,
) -> tuple[list[Measured], str]:
    """Loads all, warms each up, then `runs` rounds of a turn each; also the order, "A B A B".

    words: a turn's size and step. check: ValueError when the warmed subjects cannot be compared,
    as ones that pack different numbers of rows. The profile comes last: it slows.
    """
    ready = []
    for subject in subjects:
        say(f"loading {subject.name}")
        ready.append(subject.load()["ready"])

    def turn(subject: Subject, what: str) -> Told:
        told = subject.ask("turn")
        say(f"{what:<12} {subject.name}: {words(told)}")
        return told

    warm = [turn(subject, "warm-up") for subject in subjects]
    check(subjects, warm)
    turns: list[list[Told]] = [[] for _ in subjects]
    gpu: list[list[dict[str, Any]]] = [[] for _ in subjects]
    order = []
    for run in range(runs):
        for place, subject in enumerate(subjects):
            order.append(chr(ord("A") + place))
            with watch() as seen:
                turns[place].append(turn(subject, f"run {run + 1} of {runs}"))
                gpu[place].append(seen())
    profiles = [subject.ask("profile")["profile"] if profile else None for subject in subjects]
    measured = [
        Measured(
            name=subject.name,
            facts=ready[place],
            rows=warm[place]["rows"],
            warm_up=warm[place],
            turns=tuple(turns[place]),
            gpu=tuple(gpu[place]),
            profile=profiles[place],
        )
        for place, subject in enumerate(subjects)
    ]
    return measured, " ".join(order)


def spread(values: Iterable[float]) -> dict[str, Any]:
    """{median, min, max, n} of at least one value."""
    known = list(values)
    return {
        "median": statistics.median(known),
        "min": min(known),
        "max": max(known),
        "n": len(known),
    }


def summary(measured: Measured) -> dict[str, Any]:
    """Of every number its median, min, max and count; the single values of the steps too."""
    turns = measured.turns
    parts = turns[0]["parts"]
    return {
        "name": measured.name,
        "rows": measured.rows,
        "step_seconds": spread(_steps(turns)),
        "steps": [turn["steps"] for turn in turns],
        "parts": {name: spread(x for t in turns for x in t["parts"][name]) for name in parts},
        **_of_ranks(turns),
        **of_turns(measured, outside),
    }


def _of_ranks(turns: Sequence[Told]) -> dict[str, Any]:
    """Of several ranks: how long each computed in a step, and how long it waited for the others.

    The rank that waits least comes last to most exchanges: what it waits is the exchange, which
    computing did not hide ("exposed_seconds"). What another waits beyond that is for slower ranks
    ("imbalance_seconds", of the one that waits most). {} for one rank, or where none was measured.
    """
    parts = [turn["rank_parts"] for turn in turns if turn.get("rank_parts")]
    if len(parts) < len(turns) or not all(_WAITING in one for ranks in parts for one in ranks):
        return {}
    computing = [name for name in KERNELS if name != _WAITING]
    ranks = [
        {
            "computing_seconds": spread(
                sum(step)
                for one in of_rank
                for step in zip(*(one[name] for name in computing), strict=True)
            ),
            "waiting_seconds": spread(x for one in of_rank for x in one[_WAITING]),
        }
        for of_rank in zip(*parts, strict=True)
    ]
    waits = [step for turn in parts for step in zip(*(r[_WAITING] for r in turn), strict=True)]
    return {
        "ranks": ranks,
        "exposed_seconds": spread(min(step) for step in waits),
        "imbalance_seconds": spread(max(step) - min(step) for step in waits),
    }


def of_turns(measured: Measured, outside: Callable[[Told], float]) -> dict[str, Any]:
    """All but the single steps. outside: seconds of a turn that nothing else accounts for."""
    turns = measured.turns
    stages = dict.fromkeys(name for turn in turns for name in turn["stages"])
    told = {
        "denoise_seconds": spread(sum(turn["steps"]) for turn in turns),
        "stages": {name: spread(t["stages"].get(name, 0.0) for t in turns) for name in stages},
        "seconds": spread(turn["seconds"] for turn in turns),
        "outside_seconds": spread(outside(turn) for turn in turns),
        "warm_up": {
            "seconds": measured.warm_up["seconds"],
            "steps": measured.warm_up["steps"],
            "outside_seconds": outside(measured.warm_up),
        },
        "peak_allocated_bytes": max(turn["peak_allocated_bytes"] for turn in turns),
        "rank_peak_bytes": [max(of) for of in zip(*_rank_peaks(turns), strict=True)],
        "peak_reserved_bytes": max(turn["peak_reserved_bytes"] for turn in turns),
        "gpu": gpu_summary(measured.gpu),
        **measured.facts,
    }
    return told if measured.profile is None else {**told, "profile": measured.profile}


def _rank_peaks(turns: Iterable[Told]) -> list[list[int]]:
    """Of each turn the bytes of each rank; a rank alone is one."""
    return [turn.get("rank_peak_bytes") or [turn["peak_allocated_bytes"]] for turn in turns]


def outside(turn: Told) -> float:
    """Seconds of a turn that are neither denoising nor decoding."""
    decoding = sum(turn["stages"].get(name, 0.0) for name in _DECODES)
    return turn["seconds"] - sum(turn["steps"]) - decoding


def ratios(first: Measured, second: Measured) -> dict[str, Any]:
    """How many times as long the second takes: of the medians, and of each round's medians."""
    return ratio_of(*([turn["steps"] for turn in one.turns] for one in (first, second)))


def ratio_of(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The same of the seconds of steps, turn by turn."""
    rounds = [
        statistics.median(b) / statistics.median(a) for a, b in zip(first, second, strict=True)
    ]
    medians = [statistics.median(x for turn in one for x in turn) for one in (first, second)]
    return {"step": medians[1] / medians[0], "rounds": spread(rounds)}


def gpu_summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of what NVML told during the turns; {"reason": ...} where it told nothing."""
    told = [one for one in samples if "power_watts" in one]
    if not told:
        return {"reason": samples[0].get("reason", "no sample") if samples else "no sample"}
    counted = [one["nvlink_bytes"] for one in told if "nvlink_bytes" in one]
    links = {"nvlink_bytes": [_median(of_gpu) for of_gpu in zip(*counted, strict=False)]}
    return {
        **(links if counted else {}),
        "each": [
            {name: statistics.median(known) if known else None for name, known in of_gpu.items()}
            for of_gpu in _each([one["each"] for one in told])
        ],
        "power_watts": spread(w for one in told for w in one["power_watts"]),
        "sm_clock_mhz": spread(c for one in told for c in one["sm_clock_mhz"]),
        "temperature_c": max(c for one in told for c in one["temperature_c"]),
        "throttled": sorted({reason for one in told for reason in one["throttled"]}),
    }


def _each(of_turns: Sequence[Sequence[Mapping[str, list[float]]]]) -> list[dict[str, list[float]]]:
    """Of each GPU that was there in all turns its samples of all."""
    return [
        {name: [x for turn in of_gpu for x in turn[name]] for name in of_gpu[0]}
        for of_gpu in zip(*of_turns, strict=False)
    ]


def _median(of_turns: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Of the bytes of one GPU."""
    return {way: round(statistics.median(turn[way] for turn in of_turns)) for way in of_turns[0]}


def _steps(turns: Iterable[Told]) -> list[float]:
    return [seconds for turn in turns for seconds in turn["steps"]]
