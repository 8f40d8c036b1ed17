"""Runs a parity job: `launch.py parity` as a child of this console, its events as progress.

In the run folder: parity.jsonl grows while it runs; once it has ended parity.json says how each
case ended, cases/<n>.json holds every figure of the n-th, frames/ the pictures of both sides.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from app import presets
from app.access import User
from app.goldens import Golden, Goldens
from app.jobs import Job, State
from runtime.media.files import write_bytes_atomic, write_json_atomic

ROOT = Path(__file__).parents[1]
REPORT, EVENTS, PLAN = "parity.json", "parity.jsonl", "plan.toml"
CASES, FRAMES = "cases", "frames"
MOST_AT_ONCE = 4  # cases; each loads torch
_LOOK_SECONDS = 0.2  # between two looks at whether it was cancelled
_REBUILD = ("-m", "runtime.parity.tiny_checkpoints")

OnProgress = Callable[[str, int, int], None]


class _Cancelled(Exception):
    pass


def run(
    job: Job, folder: Path, on_progress: OnProgress, cancelled: Callable[[], bool]
) -> tuple[State, str]:
    """Replays the goldens of job.task; how it ended, and why if it did not end well.

    job.task: {"goldens": [ids], "as_captured": bool}. A golden that is not met is a result and
    not a failure: the state is "done" whenever there is a report.
    """
    try:
        chosen = Goldens(folder.parent).get(_ANYONE, job.task["goldens"])
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(folder / PLAN, presets.dump_plan(job.plan).encode())
        _Run(job, folder, chosen, on_progress, cancelled).all()
    except _Cancelled:
        return "cancelled", ""
    except (ValueError, OSError) as error:
        return "failed", str(error)
    return "done", ""


_ANYONE = User(name="", admin=True)  # whose goldens they are was asked when the job was made


class _Run:
    def __init__(
        self,
        job: Job,
        folder: Path,
        chosen: Sequence[Golden],
        on_progress: OnProgress,
        cancelled: Callable[[], bool],
    ) -> None:
        self._job, self._folder, self._chosen = job, folder, chosen
        self._on_progress, self._cancelled = on_progress, cancelled
        self._ended = 0

    def all(self) -> None:
        """One child per folder of checkpoints; then the report."""
        began = time.time()
        results: list[dict[str, Any]] = []
        (self._folder / EVENTS).write_bytes(b"")
        device = ""
        ordered = sorted(self._chosen, key=_place)  # stable: else as chosen
        for n, (place, group) in enumerate(groupby(ordered, _place)):
            goldens = tuple(group)
            if place and goldens[0].rebuilt:
                self._tell("tiny checkpoints")
                self._child([*_REBUILD, place, goldens[0].rebuilt], {0})
            report = self._replay(goldens, n)
            device = report["device"]
            for golden, result in zip(goldens, report["results"], strict=True):
                frames = result["frames"]
                if frames and "folder" in frames:
                    frames["folder"] = f"{n}/{frames['folder']}"
                result |= {"golden": golden.id, "path": golden.path.name}
                details = {"details": result.pop("details")}
                write_json_atomic(self._folder / CASES / f"{len(results)}.json", details)
                results.append(result)
        counts = [result["status"] for result in results]
        write_json_atomic(
            self._folder / REPORT,
            {
                "id": self._job.id,
                "plan": "" if self._job.task["as_captured"] else self._job.plan.name,
                "device": device,
                "began": began,
                "seconds": time.time() - began,
                "cases": len(results),
                "counts": {status: counts.count(status) for status in sorted(set(counts))},
                "results": results,
            },
        )

    def _replay(self, goldens: Sequence[Golden], number: int) -> dict[str, Any]:
        report = self._folder / f"part{number}.json"
        command = ["launch.py", "parity", *(str(golden.path) for golden in goldens)]
        command += ["--json", str(report)]
        if place := _place(goldens[0]):
            command += ["--checkpoints", place]
        command += ["--dump", str(self._folder / FRAMES / str(number)), "--events"]
        command += ["--jobs", str(min(MOST_AT_ONCE, os.cpu_count() or 1))]
        if not self._job.task["as_captured"]:
            command += ["--plan", str(self._folder / PLAN)]
        self._child(command, {0, 1})  # 1: a golden was not met
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        report.unlink()
        return found

    def _child(self, arguments: Sequence[str], good: set[int]) -> None:
        """Runs python until it ends; ValueError with its last line if it ends otherwise."""
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its workers are ended with it, as one group
        ) as child:
            try:
                said = self._follow(child)
                status = child.wait()
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        if status not in good:
            raise ValueError(_reason(said, status))

    def _follow(self, child: subprocess.Popen[bytes]) -> list[str]:
        """Reads both streams to their end; returns the last lines of stderr."""
        assert child.stdout is not None and child.stderr is not None
        said: list[str] = []
        with selectors.DefaultSelector() as ready:
            for stream in (child.stdout, child.stderr):
                os.set_blocking(stream.fileno(), False)
                ready.register(stream, selectors.EVENT_READ, _Lines(stream))
            while ready.get_map():
                if self._cancelled():
                    raise _Cancelled
                for key, _ in ready.select(_LOOK_SECONDS):
                    lines: _Lines = key.data
                    for line in lines.read():
                        if key.fileobj is child.stdout:
                            self._event(line)
                        else:
                            said = [*said[-20:], line]
                    if lines.closed:
                        ready.unregister(key.fileobj)
        return said

    def _event(self, line: str) -> None:
        event = json.loads(line)
        if event["event"] == "result":
            self._ended += 1
        if event["event"] in ("case", "step", "result"):
            case = event["case"]
            words = {"case": "starts", "result": event.get("status")}
            step = f"{event.get('run')} step {event.get('done')} of {event.get('total')}"
            self._tell(f"{case}: {words.get(event['event'], step)}")
            with (self._folder / EVENTS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _tell(self, stage: str) -> None:
        self._on_progress(stage, self._ended, len(self._chosen))


def _place(golden: Golden) -> str:
    """Where its checkpoints are; "" if it needs none."""
    return str(golden.checkpoints) if golden.needs else ""


class _Lines:
    """The whole lines of a pipe that does not block."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._rest = stream, b""
        self.closed = False

    def read(self) -> Iterator[str]:
        data = os.read(self._stream.fileno(), 1 << 16)
        self.closed = not data
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self.closed and self._rest:
            whole.append(self._rest)
        for line in whole:
            yield line.decode(errors="replace")


def _reason(said: Sequence[str], status: int) -> str:
    """The sentence of a child that could not do its work."""
    last = next((line for line in reversed(said) if line.strip()), "it said nothing")
    if status == 2:  # a sentence for a person
        return re.sub(r"^launch\.py parity: ", "", last)
    if status == -signal.SIGKILL:
        return "the replay was killed, most likely for want of memory; run fewer goldens at once"
    return f"the replay ended with status {status} ({last[:300]})"
