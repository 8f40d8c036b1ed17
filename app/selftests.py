"""What `launch.py selftest` last found of each backend on this machine: <runs>/selftest/*.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "selftest"
_MOST_BYTES = 4 << 20  # of a file that is read at all


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """One backend's newest finding; a failed one of any field counts before a passed one."""

    backend: str
    passed: bool
    text: str
    when: float  # epoch seconds


def selftests(root: Path, devices: Collection[str]) -> dict[str, SelfTest]:
    """By backend; what could not run tells nothing. devices: the names of this machine's."""
    found: dict[str, SelfTest] = {}
    for test in sorted(_read(root / FOLDER, devices), key=lambda one: one.when):
        older = found.get(test.backend)
        if older is None or older.passed:
            found[test.backend] = test
    return found


def _read(folder: Path, devices: Collection[str]) -> Iterator[SelfTest]:
    for path in sorted(folder.glob("*.json")):
        try:
            if path.stat().st_size > _MOST_BYTES:
                continue
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["device"] in devices:
                yield from list(_of(told))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged
            continue


def _of(told: dict[str, Any]) -> Iterator[SelfTest]:
    for one in told["backends"]:
        if one["status"] not in ("pass", "fail"):
            continue
        passed = one["status"] == "pass"
        text = "self-test passed" if passed else f"self-test failed: {one['reason']}"
        yield SelfTest(
            backend=str(one["backend"]), passed=passed, text=text, when=float(told["when"])
        )
