"""The doctor in a process of its own: {"plan", "root"} on stdin, its findings as JSON on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from app.doctor import Machine, examine, summary, torch_devices
from app.stored import plan_of


def main() -> None:
    """The port is left out: the console that asks has it."""
    asked = json.load(sys.stdin)
    plan = plan_of(asked["plan"])
    found = tuple(examine(plan, Path(asked["root"]), Machine(devices=torch_devices)))
    print(json.dumps({"plan": plan.name, **summary(found)}))


if __name__ == "__main__":
    main()
