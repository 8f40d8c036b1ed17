"""Many jobs from several clients at once against a real console: python -m tests.load.

All must end done, in the order of the queue, none twice, and GET /api/v1/jobs must stay quick
while jobs run. Prints what was measured; the last line is JSON, the exit status 1 on failure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from app.access import Access
from app.hosts import Hosts, listen
from panels.serve import serve
from tests import fakes
from tests.consoles import demo_plan

ROOT = Path(__file__).parents[1]
MOST_P95_SECONDS = 0.05
REQUEST = {"prompt": "a calm sea", "width": 64, "height": 64, "frames": 22, "steps": 4}


def run(jobs: int, clients: int, *, seconds: float, quick: bool = True) -> dict[str, Any]:
    """Enqueues, waits and checks; the report, whose "faults" are sentences (none: all is well).

    quick: the speed counts too. seconds: the time that everything may take.
    """
    with tempfile.TemporaryDirectory(prefix="h3-load-") as folder:
        runs = Path(folder)
        with _console(runs) as port, ThreadPoolExecutor(clients) as pool:
            began = time.monotonic()
            shares = [jobs // clients + (n < jobs % clients) for n in range(clients)]
            made = [id for ids in pool.map(lambda n: _enqueue(port, n), shares) for id in ids]
            enqueued_seconds = time.monotonic() - began
            times = _watch(port, jobs, began + seconds)
            listed = _get(port, "/api/v1/jobs?limit=1000")["jobs"]
        faults = _faults(runs, made, listed)
    p95 = sorted(times)[int(0.95 * len(times))]
    if quick and p95 > MOST_P95_SECONDS:
        faults.append(f"the 95th percentile of GET /api/v1/jobs is {p95 * 1000:.0f} ms")
    return {
        "jobs": jobs,
        "clients": clients,
        "seconds": round(time.monotonic() - began, 2),
        "enqueued_seconds": round(enqueued_seconds, 3),
        "list_requests": len(times),
        "list_p50_ms": round(sorted(times)[len(times) // 2] * 1000, 1),
        "list_p95_ms": round(p95 * 1000, 1),
        "faults": faults,
    }


def _enqueue(port: int, count: int) -> list[str]:
    """One client: its jobs one after another over one connection; their ids."""
    connection, ids = HTTPConnection("127.0.0.1", port, timeout=60), list[str]()
    for n in range(count):
        body = json.dumps({"request": REQUEST | {"seed": n}, "plans": ["cpu"]})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/api/v1/jobs", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 201, text
        ids += [job["id"] for job in json.loads(text)["jobs"]]
    return ids


def _watch(port: int, jobs: int, end: float) -> list[float]:
    """Asks for the list until every job is over; the seconds of each answer while one ran."""
    connection, times = HTTPConnection("127.0.0.1", port, timeout=60), list[float]()
    while time.monotonic() < end:
        began = time.monotonic()
        connection.request("GET", "/api/v1/jobs?limit=1000")
        listed = json.loads(connection.getresponse().read())["jobs"]
        took = time.monotonic() - began
        states = [job["state"] for job in listed]
        if "running" in states:
            times.append(took)
        if len(states) == jobs and not {"queued", "running", "cancelling"} & set(states):
            return times
        time.sleep(0.05)
    raise TimeoutError(f"not all of {jobs} jobs ended in time: {sorted(set(states))}")


def _faults(runs: Path, made: list[str], listed: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the runs, in sentences."""
    by_start = sorted(listed, key=lambda job: job["started"])
    order = [job["id"] for job in by_start]
    faults = []
    if len(set(made)) != len(made) or sorted(made) != sorted(order):
        faults.append(f"{len(made)} jobs were made and {len(order)} are there")
    if any(job["state"] != "done" for job in listed):
        faults.append(f"not all are done: {sorted({job['state'] for job in listed})}")
    if order != [job["id"] for job in sorted(listed, key=lambda job: job["position"])]:
        faults.append("they did not run in the order of the queue")
    for one, after in itertools.pairwise(by_start):
        if after["started"] < one["ended"]:
            faults.append(f"{after['id']} began before {one['id']} had ended")
    for id in order:
        lines = (runs / id / "events.jsonl").read_text(encoding="utf-8").splitlines()
        results = sum(json.loads(line)["event"] == "Result" for line in lines)
        if results != 1:
            faults.append(f"{id} ran {results} times")
    return faults


@contextmanager
def _console(runs: Path) -> Iterator[int]:
    """A console with the fake family in a process of its own; yields its port."""
    command = [sys.executable, "-m", "tests.load", "--console", str(runs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            match = re.fullmatch(r"port (\d+)\n", process.stdout.readline())
            assert match, "the console did not start"
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield int(match[1])
        finally:
            process.terminate()
            process.wait(60)


def _serve(runs: Path) -> None:
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        serve(
            demo_plan(),
            Access(runs),
            Hosts("127.0.0.1"),
            listening,
            root=runs,
            when_up=lambda: print(f"port {port}", flush=True),
            families=fakes.FAMILIES,
        )


def _get(port: int, path: str) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def main() -> int:
    """The command; exit status 0 when nothing was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of it")
    parser.add_argument("--console", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.console is not None:
        _serve(args.console)
        return 0
    report = run(args.jobs, args.clients, seconds=args.seconds)
    for fault in report["faults"]:
        print(fault)
    print(json.dumps(report))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
