"""`python -m runtime.probe`: one JSON of what this machine can run, each backend really tried.

Keys: machine, devices, attention, linear, elementwise (lists of runtime.probes.base.Backend),
kitchen (comfy-kitchen's own backends), layouts, problems (sentences: what could not be asked).
It needs the GPUs for some seconds and ends: the console runs it as a child.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from runtime.layouts import LAYOUTS, Layout
from runtime.machine import Device, devices, machine
from runtime.probes.base import Backend, reason_of, version_of

SECTIONS = ("attention", "linear", "elementwise")


def probe() -> dict[str, Any]:
    """Everything that can be asked; a package that breaks becomes a sentence in "problems"."""
    problems: list[str] = []
    found = devices()
    where = tuple(torch.device(device.device) for device in found)
    backends = {name: _section(name, where, problems) for name in SECTIONS}
    return {
        "machine": asdict(machine()),
        "devices": [asdict(device) for device in found],
        **{name: [asdict(backend) for backend in own] for name, own in backends.items()},
        "kitchen": _kitchen(problems),
        "layouts": _layouts(found),
        "problems": problems,
    }


def _section(
    name: str, where: tuple[torch.device, ...], problems: list[str]
) -> tuple[Backend, ...]:
    try:
        # Imported here: a broken comfy-kitchen takes its own sections, and not the rest.
        backends: tuple[Backend, ...] = importlib.import_module(f"runtime.probes.{name}").backends(
            where
        )
    except Exception as error:
        problems.append(f"the {name} backends cannot be asked: {reason_of(error)}")
        return ()
    return backends


def _kitchen(problems: list[str]) -> dict[str, Any]:
    """Version and backends of comfy-kitchen: name -> "" when it runs, else the reason."""
    try:
        states = importlib.import_module("comfy_kitchen").list_backends()
    except Exception as error:
        problems.append(f"comfy-kitchen cannot be asked: {reason_of(error)}")
        states = {}
    return {
        "version": version_of("comfy-kitchen"),
        "backends": {
            name: "" if state.get("available") else str(state.get("unavailable_reason"))
            for name, state in states.items()
        },
    }


def _layouts(found: tuple[Device, ...]) -> list[dict[str, Any]]:
    """How a request can be spread over devices; `ranks` is the number of processes."""
    gpus = len(found) - 1
    has = f"this machine has {gpus} CUDA GPU{'' if gpus == 1 else 's'}"
    rows = [{"name": "CPU", "ranks": 1, "available": True, "reason": ""}]
    for name in LAYOUTS:
        ranks = Layout.parse(name).ranks
        rows.append(
            {
                "name": f"{name}: {ranks} GPU{'' if ranks == 1 else 's'}",
                "ranks": ranks,
                "available": gpus >= ranks,
                "reason": "" if gpus >= ranks else has,
            }
        )
    return rows


def main() -> None:
    """Prints the JSON alone on stdout, whatever the packages print."""
    with contextlib.redirect_stdout(sys.stderr):
        result = probe()
    print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
