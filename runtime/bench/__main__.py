"""`python -m runtime.bench`: one subject of a benchmark; it takes its turns when it is told to.

JSON lines: first the setup on stdin, answered by {"ready": facts, "rows": S}; then each
{"do": "turn"} or {"do": "profile"} by what it found. A failure is {"error": sentence,
"bad_input": bool} and the process ends; so it does when stdin ends, with status 0 if its other
ranks end well too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from typing import Any, TextIO

import torch

from runtime.bench.base import Subject
from runtime.lifeline import die_with_parent
from runtime.machine import machine
from runtime.worker import sentence

SETUPS = {"h3": ("base", "setup_of"), "ltx": ("ltx_base", "ltx_setup_of")}  # by family
SUBJECTS = {  # by the setup's kind
    "plan": ("ours", "PlanSubject"),
    "ranks": ("ranks", "RanksSubject"),
    "diffusers": ("peer", "DiffusersSubject"),
    "ltx plan": ("ltx", "RequestSubject"),
    "ltx sampling": ("ltx", "SamplingSubject"),
    "ltx diffusers": ("ltx_peer", "DiffusersSubject"),
}


def main() -> int:
    """0, or 1 after a failure that was told."""
    die_with_parent(os.getppid())
    answers = _own_stdout()
    try:
        told = json.loads(sys.stdin.readline())
        setup = _named(SETUPS[told["request"].get("family", "h3")])(told)
        subject: Subject = _named(SUBJECTS[setup.kind])(setup)
        facts = {
            **subject.facts,
            "machine": asdict(machine()),
            "device_name": _name(setup.plan.device),
        }
        _say(answers, {"ready": facts, "rows": subject.rows})
        for line in sys.stdin:
            _say(answers, _answer(subject, json.loads(line)["do"]))
        subject.close()
    except Exception as error:  # whatever it is, the parent tells it in one sentence
        traceback.print_exc()
        bad_input = isinstance(error, ValueError)
        _say(answers, {"error": sentence(error), "bad_input": bad_input})
        return 1
    return 0


def _named(place: tuple[str, str]) -> Any:
    """What a module of this package calls so; only what is needed is imported."""
    module, name = place
    return getattr(importlib.import_module(f"runtime.bench.{module}"), name)


def _answer(subject: Subject, command: str) -> dict[str, Any]:
    if command == "profile":
        return {"profile": subject.profile(), "rows": subject.rows}
    assert command == "turn", command
    return {**asdict(subject.turn()), "rows": subject.rows}


def _own_stdout() -> TextIO:
    """What is printed by packages, in C too, goes to stderr; only answers go to stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, told: dict[str, Any]) -> None:
    answers.write(json.dumps(told) + "\n")
    answers.flush()


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
