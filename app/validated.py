"""What is known of each backend: from presets/backends.toml, and from what has run here."""

from __future__ import annotations

import functools
import json
import threading
import tomllib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import presets, records
from app.gates import Gate, gates
from app.jobs import JobStore
from app.parity_runs import REPORT
from app.selftests import SelfTest, selftests

FILE = presets.FOLDER / "backends.toml"
# of a plan, each names a backend
FIELDS = ("attention", "vae_attention", "dense", "nvfp4", "fp8", "int8", "elementwise")
ALWAYS = ("attention", "vae_attention", "elementwise")  # used whatever the files hold
PASSED = ("bit-equal", "pass", "info")
_RECENT = 500  # jobs that are looked at
_KEPT = 2000  # what they told


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One backend without running it; lossy: what it rounds away, "" for nothing."""

    help: str
    lossy: str
    cpu: str  # validated on the CPU, as in README.md
    h200: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What this console has seen of one backend; `text` says it in one sentence."""

    text: str
    verdict: str  # good | bad | ""
    runs: int = 0
    last: float = 0.0  # epoch seconds of the last run
    cases: int = 0  # parity cases that used it
    bit_equal: int = 0
    failed: tuple[str, ...] = ()
    gate: str = ""  # what the last `launch.py gate` of it said here; "" for none
    gate_status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One thing that a job told: a run with a backend, or a parity case with its status."""

    backend: str
    ended: float
    device: str
    case: str = ""
    status: str = ""


@functools.cache
def table() -> Mapping[str, Any]:
    """presets/backends.toml, which belongs to the program and does not change while it runs."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def known() -> dict[str, Known]:
    """By name of the backend."""
    where: dict[str, tuple[str, str]] = {}
    for row in table()["validated"]:
        for index, name in enumerate(row["backends"]):
            cpu, h200 = row["cpu"], row["h200"]
            where[name] = (cpu[index % len(cpu)], h200[index % len(h200)])
    return {
        name: Known(
            help=entry["help"],
            lossy=entry.get("lossy", ""),
            cpu=where.get(name, ("", ""))[0],
            h200=where.get(name, ("", ""))[1],
        )
        for name, entry in table()["backend"].items()
    }


def markdown() -> Iterator[str]:
    """The rows of README.md's table."""
    for row in table()["validated"]:
        yield f"| {row['part']} | {' / '.join(row['cpu'])} | {' / '.join(row['h200'])} |"


class Validated:
    """Reads what the ended jobs of a console told, each once; any thread may ask."""

    def __init__(self, jobs: JobStore, root: Path) -> None:
        self._jobs, self._root = jobs, root
        self._lock = threading.Lock()
        self._told: OrderedDict[str, tuple[_Seen, ...]] = OrderedDict()

    def states(self, devices: Iterable[str]) -> dict[str, State]:
        """By backend; devices: the names of this machine's, others' runs do not count."""
        here = frozenset(devices)
        found: dict[str, list[_Seen]] = {}
        with self._lock:
            for job in self._jobs.list(states=("done",), limit=_RECENT):
                if job.id not in self._told:
                    tell = _parity if job.kind == "parity" else _run
                    self._told[job.id] = tuple(tell(self._root / job.id, job.ended))
                for seen in self._told[job.id]:
                    if seen.device in here:
                        found.setdefault(seen.backend, []).append(seen)
            while len(self._told) > _KEPT:
                self._told.popitem(last=False)
        last, tests = gates(self._root, here), selftests(self._root, here)
        return {
            name: _state(found.get(name, []), last.get(name), tests.get(name))
            for name in table()["backend"]
        }


def _run(folder: Path, ended: float) -> Iterator[_Seen]:
    """A backend was used if the engine's resolved plan names it."""
    try:
        record = records.finished(folder)
    except ValueError:  # damaged: it tells nothing
        record = None
    if record is None:
        return
    resolved = (record.get("engine") or {}).get("resolved") or {}
    plan, device = record["plan"], str(resolved.get("device", ""))
    used = {plan[name] for name in ALWAYS if resolved.get(name)}
    used |= {name.removeprefix("linear ") for name in resolved if name.startswith("linear ")}
    for backend in sorted(used):
        yield _Seen(backend=backend, ended=ended, device=device)


def _parity(folder: Path, ended: float) -> Iterator[_Seen]:
    """A case used the backends that its settings name."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for result in report["results"]:
        for setting in result.get("settings", ()):
            # A plan names a backend for each stored format, used or not; a golden only those used.
            used = setting["field"] in ALWAYS or setting["from"] == "golden"
            if setting["field"] in FIELDS and used and result["status"] != "unsupported":
                yield _Seen(
                    backend=setting["value"],
                    ended=ended,
                    device=report["device"],
                    case=result["case"],
                    status=result["status"],
                )


def _state(seen: list[_Seen], gate: Gate | None, test: SelfTest | None) -> State:
    """Runs counted, and of each parity case the newest status (the jobs come newest first)."""
    runs = [one for one in seen if not one.case]
    newest: dict[str, str] = {}
    for one in seen:
        if one.case:
            newest.setdefault(one.case, one.status)
    failed = tuple(sorted(case for case, status in newest.items() if status not in PASSED))
    equal = sum(status == "bit-equal" for status in newest.values())
    said = [_ran(len(runs)), _compared(len(newest), equal, failed), test.text if test else ""]
    bad = bool(failed) or (test is not None and not test.passed)
    return State(
        text="; ".join(part for part in said if part) or "not validated on this machine",
        verdict="bad" if bad else "good" if newest or test else "",
        runs=len(runs),
        last=max((one.ended for one in seen), default=0.0),
        cases=len(newest),
        bit_equal=equal,
        failed=failed,
        gate="" if gate is None else gate.text,
        gate_status="" if gate is None else gate.status,
    )


def _ran(count: int) -> str:
    return f"ran {'once' if count == 1 else f'{count} times'}" if count else ""


def _compared(cases: int, equal: int, failed: tuple[str, ...]) -> str:
    if not cases:
        return ""
    goldens = f"{cases} golden{'' if cases == 1 else 's'}"
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"parity failed on {failed[0]}{more} of {goldens}"
    if equal == cases:
        return f"bit-equal on {goldens}"
    return f"within limits on {goldens}, {equal} bit-equal"
