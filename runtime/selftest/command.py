"""`launch.py selftest`: every backend and the tiny goldens; the console reads the result."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from runtime.machine import machine
from runtime.media.files import write_json_atomic
from runtime.probes.base import version_of
from runtime.selftest.base import Finding
from runtime.selftest.kernels import findings

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
FOLDER = ROOT / "runs" / "selftest"
PACKAGES = (
    *("torch", "triton", "comfy-kitchen", "sageattention", "sageattn3", "flash-attn-4"),
    *("flashinfer-python", "sol-attn", "quack-kernels", "nvidia-cutlass-dsl"),
)
FAILED = 1
_WORDS = {"pass": "ok", "fail": "FAIL", "unavailable": "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is one")
    parser.add_argument("--goldens", type=Path, default=GOLDENS, help="folder of golden files")
    parser.add_argument("--no-goldens", action="store_true", help="the kernels alone")
    parser.add_argument("--out", type=Path, help="the result (runs/selftest/<device>.json)")


def run(args: argparse.Namespace) -> int:
    """One line a backend, then the result as one line of JSON; 1 if anything failed."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no CUDA device; give --device cpu")
    if not args.no_goldens and not args.goldens.is_dir():
        raise ValueError(f"{args.goldens} is no folder of goldens; give --goldens or --no-goldens")
    device = torch.device(kind)
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "cpu"
    path = args.out or FOLDER / f"{_slug(name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)  # refused now, not after minutes
    seen: list[Finding] = []
    for finding in findings(device):
        seen.append(finding)
        print(_line(finding), flush=True)
    goldens = None if args.no_goldens else _goldens(args.goldens, kind)
    told = result(name, device, seen, goldens)
    write_json_atomic(path, told)
    print(json.dumps({"file": str(path), **told}))
    return 0 if told["ok"] else FAILED


def result(
    name: str, device: torch.device, seen: list[Finding], goldens: dict[str, Any] | None
) -> dict[str, Any]:
    """All that was found, as the file has it; goldens: None where they were left out."""
    passed = goldens is None or goldens["status"] == 0
    cuda = device.type == "cuda"
    return {
        "selftest": 1,
        "ok": passed and all(one.status != "fail" for one in seen),
        "when": time.time(),
        "device": name,
        "capability": list(torch.cuda.get_device_capability(device)) if cuda else [],
        "machine": asdict(machine()),
        "versions": {package: version_of(package) for package in PACKAGES},
        "backends": [asdict(one) for one in seen],
        "goldens": goldens,
    }


def _goldens(folder: Path, device: str) -> dict[str, Any]:
    """What `launch.py parity` said in its last line, and its exit status."""
    command = [sys.executable, str(ROOT / "launch.py"), "parity", str(folder), "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        told: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        told = {"reason": words[-1]}
    print(f"goldens   {json.dumps(told)}", flush=True)
    return {"status": done.returncode, **told}


def _line(found: Finding) -> str:
    off = found.reference_deviation if found.judged_by != "fp32" else found.exact_deviation
    numbers = "" if off is None else f"{off:.2e} off {found.judged_by}"
    timed = "" if found.milliseconds is None else f"{found.milliseconds:9.3f} ms"
    said = found.reason or found.route
    place = f"{found.field} {found.backend}"
    return f"{_WORDS[found.status]:<5} {place:<36} {numbers:<26} {timed:<13} {said}".rstrip()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
