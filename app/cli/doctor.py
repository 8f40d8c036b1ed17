"""`launch.py doctor`: whether this machine can run a plan, and what to do where it cannot."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from pathlib import Path

from app import doctor, presets, runs
from app.doctor import Finding, Machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--plan", default="cpu", help="a TOML file or a name in presets/plans")
    parser.add_argument("--runs", type=Path, default=runs.FOLDER, help="where runs will be kept")
    parser.add_argument("--host", default="127.0.0.1", help="where the console will listen")
    parser.add_argument("--port", type=int, default=7860, help="where the console will listen")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")


def run(args: argparse.Namespace) -> int:
    """One line a finding, then all of them as one line of JSON; 1 if any is fatal, else 0."""
    plan = presets.load_plan(presets.find("plans", args.plan))
    found = []
    machine = Machine(devices=doctor.torch_devices)
    for finding in _all(doctor.examine(plan, args.runs, machine), args.host, args.port):
        found.append(finding)
        if not args.json:
            print(_line(finding), flush=True)
    told = doctor.summary(tuple(found))
    print(json.dumps({"plan": plan.name, **told}))
    return 0 if told["ok"] else 1


def _all(findings: Iterator[Finding], host: str, port: int) -> Iterator[Finding]:
    yield from findings
    yield port_finding(host, port)


def port_finding(host: str, port: int) -> Finding:
    """Whether the console could listen there."""
    name = f"port {port}"
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
        text = f"cannot be used on {host} ({reason})"
        return Finding(name=name, status="warning", text=text, todo="choose another with --port")
    return Finding(name=name, status="ok", text=f"free on {host}")


def _line(finding: Finding) -> str:
    todo = f" -> {finding.todo}" if finding.todo else ""
    return f"{finding.status:<8} {finding.name:<17} {finding.text}{todo}"
