"""What `launch.py gate` last said of each backend on this machine, from <runs>/gate/*.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "gate"
_MOST_BYTES = 64 << 20  # of a file that is read at all
_BAD = ("failed",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The newest gate of one backend; a failed one of any field counts before a passed one."""

    backend: str
    text: str  # "passed (int8_attention, worst video 0.047, audio 0.047)"
    status: str  # passed | failed | unavailable | not exercised
    when: float  # epoch seconds


def gates(root: Path, devices: Collection[str]) -> dict[str, Gate]:
    """By backend; devices: the names of this machine's, others' gates do not count."""
    found: dict[str, Gate] = {}
    for gate in sorted(_read(root / FOLDER, devices), key=lambda one: one.when):
        older = found.get(gate.backend)
        if older is None or older.status not in _BAD or gate.status in _BAD:
            found[gate.backend] = gate
    return found


def _read(folder: Path, devices: Collection[str]) -> Iterator[Gate]:
    """One file per device, field and backend: `launch.py gate` writes it anew each time."""
    for path in sorted(folder.glob("*.json")):
        try:
            if path.stat().st_size > _MOST_BYTES:
                continue
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["device"] not in devices or len(told["backends"]) != 1:
                continue
            yield Gate(
                backend=told["backends"][0],
                text=": ".join([*told["options"], _text(told)]),
                status=told["status"],
                when=float(told["when"]),
            )
        except (OSError, ValueError, KeyError, TypeError):  # damaged: it tells nothing
            continue


def _text(told: dict[str, Any]) -> str:
    status: str = told["status"]
    if status not in ("passed", "failed"):
        return f"{status} ({told['reason']})" if told["reason"] else status
    worst = ", ".join(
        f"{stream} {'not finite' if told['worst'][stream] is None else _short(told, stream)}"
        for stream in ("video", "audio")
    )
    return f"{status} ({', '.join(told['classes'])}, worst {worst})"


def _short(told: dict[str, Any], stream: str) -> str:
    return f"{told['worst'][stream]:.2g}"
