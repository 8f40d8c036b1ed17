"""Kills a real console and its engine again and again, and counts what that cost.

python -m tests.chaos --times 20 [--demo]: kill -9 of the engine at step 3, then of the console at
step 3, so many times each in a row; the last line is JSON, the exit status 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
MARK = "H3_CHAOS"  # in the environment of every process of one run: how an orphan is known
KILL_AT_STEP = 3
GONE_SECONDS = 5.0  # in which the children of a killed console have to be gone
SLACK = 1.15  # of memory over the first round's
SMALL = {"width": 64, "height": 64, "frames": 22}


@dataclass(slots=True)
class Count:
    """What went wrong, in words, and the memory after every round."""

    lost: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    mib: list[tuple[int, int]] = field(default_factory=list)  # console, engine

    @property
    def grown(self) -> bool:
        """The memory is not back at the baseline, which is the first round's."""
        console, engine = (min(mib) for mib in zip(*self.mib[-3:], strict=True))
        return console > SLACK * self.mib[0][0] or engine > SLACK * self.mib[0][1]


class Chaos:
    """One runs folder and the console that is killed over it."""

    def __init__(self, root: Path, *, demo: bool) -> None:
        self._root, self._demo = root, demo
        self.mark = secrets.token_hex(8)
        self._port = 0
        self._console: subprocess.Popen[bytes] | None = None
        self._states: dict[str, str] = {}  # of every job that has ended
        self.count = Count()

    # ---- the console

    def start(self) -> None:
        """Starts a console and waits until it answers."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "tests.chaos", "--serve", str(self._root)]
        command += ["--port", str(self._port), *(["--demo"] if self._demo else [])]
        environment = os.environ | {MARK: self.mark}
        with (self._root / "console.out").open("ab") as out:
            self._console = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=out
            )
        self._wait("the console answers", lambda: self._answers(), 120)

    def stop(self) -> None:
        """Ends the console as Ctrl-C does."""
        console = self._console
        assert console is not None
        console.send_signal(signal.SIGINT)
        console.wait(30)
        self.see_orphans("the end", set())

    def _answers(self) -> bool:
        assert self._console is not None and self._console.poll() is None, "the console ended"
        with suppress(OSError):
            return bool(self._ask("GET", "/jobs"))
        return False

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/api/v1{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def _engines(self) -> list[psutil.Process]:
        assert self._console is not None
        children = psutil.Process(self._console.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    # ---- one round

    def kill_engine(self, what: str) -> None:
        """Kills the ranks at the third step: one job interrupted, the others done."""
        ids = self._enqueue()
        self._until_step(ids[0])
        for engine in self._engines():
            engine.kill()
        self._settle(what, ids)
        assert self._console is not None
        self.see_orphans(what, _family(self._console.pid))

    def kill_console(self, what: str) -> None:
        """Kills the console at the third step and starts it again: the same is true."""
        ids = self._enqueue()
        self._until_step(ids[0])
        assert self._console is not None
        self._console.kill()
        self._console.wait()
        self.see_orphans(what, set())
        self.start()
        self._settle(what, ids)

    def resume(self) -> None:
        """An interrupted job can be run anew."""
        id = next(id for id, state in self._states.items() if state == "interrupted")
        again = self._ask("POST", f"/jobs/{id}/retry")["id"]
        self._settle("resume", [again], first="done")

    def _enqueue(self) -> list[str]:
        steps = 400 if self._demo else 6
        request = SMALL | {"prompt": "slow", "steps": steps}
        bodies = [{"request": request, "plans": ["cpu"]}]
        bodies += [{"request": SMALL | {"prompt": "next", "steps": 2}, "plans": ["cpu"]}] * 2
        return [self._ask("POST", "/jobs", body)["jobs"][0]["id"] for body in bodies]

    def _until_step(self, id: str) -> None:
        def there() -> bool:
            job = self._ask("GET", f"/jobs/{id}")
            return job["stage"] == "denoise" and job["done"] >= KILL_AT_STEP

        self._wait("step 3", there, 60)

    def _settle(self, what: str, ids: list[str], first: str = "interrupted") -> None:
        """Waits for the queue to be empty, then holds every job of all rounds to its state."""
        self._wait(
            "an empty queue",
            lambda: not self._ask("GET", "/jobs?state=queued,running")["jobs"],
            120,
        )
        self._states |= dict.fromkeys(ids, "done") | {ids[0]: first}
        jobs = {job["id"]: job for job in self._ask("GET", "/jobs?limit=1000")["jobs"]}
        for id, state in self._states.items():
            if problem := self.problem(id, state, jobs.get(id)):
                self.count.lost.append(f"{what}: {id} {problem}")
        console = psutil.Process(self._console.pid) if self._console else None
        engines = self._wait("a ready engine", self._ready_engines, 60)
        assert console is not None
        self.count.mib.append((_mib(console), sum(map(_mib, engines))))

    def _ready_engines(self) -> list[psutil.Process]:
        ready = self._ask("GET", "/jobs?limit=1")["engine"]["state"] == "ready"
        return self._engines() if ready else []

    def problem(self, id: str, state: str, job: dict[str, Any] | None) -> str:
        """What is wrong with a job of the REST list, or with its folder; "" if nothing is."""
        folder = self._root / id
        if job is None:
            return "is gone"
        if job["state"] != state:
            return f"is {job['state']} and not {state}: {job['reason']}"
        if state == "interrupted" and (job["stage"] != "denoise" or job["done"] < KILL_AT_STEP):
            return f"was interrupted at {job['stage']} {job['done']}, not at step {KILL_AT_STEP}"
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if record["state"] != state or list(folder.glob("*.part")):
            return f"has a folder that says {record['state']}, or parts in it"
        ends = (folder / "events.jsonl").read_text(encoding="utf-8").count('"event": "Result"')
        return "" if ends == (state == "done") else f"ended {ends} times"

    def see_orphans(self, what: str, allowed: set[int]) -> None:
        """Processes of this run that are left though they should not be."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := [p for p in self._marked() if p.pid not in allowed]:
            if time.monotonic() > deadline:
                self.count.orphans += [f"{what}: {p.pid} {' '.join(p.cmdline())}" for p in left]
                return
            time.sleep(0.02)

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.pid != os.getpid():
                    found.append(process)
        return found

    def _wait(self, what: str, met: Callable[[], T], seconds: float) -> T:
        deadline = time.monotonic() + seconds
        while not (answer := met()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come in {seconds:.0f} s, see {self._root}")
            time.sleep(0.02)
        return answer


def run(root: Path, times: int, *, demo: bool, say: Callable[[str], object]) -> Count:
    """All rounds; `say` is told one line a round."""
    chaos = Chaos(root, demo=demo)
    count = chaos.count
    chaos.start()
    for name, kill in (("engine", chaos.kill_engine), ("console", chaos.kill_console)):
        for n in range(times):
            what = f"{name} {n + 1}/{times}"
            kill(what)
            console, engine = count.mib[-1]
            say(
                f"kill -9 of the {what}: lost {len(count.lost)}, orphans {len(count.orphans)}, "
                f"console {console} MiB, engine {engine} MiB"
            )
    chaos.resume()
    chaos.stop()
    return count


def _family(pid: int) -> set[int]:
    process = psutil.Process(pid)
    return {pid, *(child.pid for child in process.children(recursive=True))}


def _mib(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss) >> 20


def _serve(root: Path, port: int, *, demo: bool) -> None:
    """The console to be killed: all of it, with the page."""
    from app.access import Access
    from app.hosts import Hosts
    from panels.serve import serve
    from runtime.families import FAMILIES
    from tests import fakes
    from tests.consoles import demo_plan

    plan = replace(demo_plan(), family="h3" if demo else "fake")
    families = FAMILIES if demo else fakes.FAMILIES
    listening = socket.create_server(("127.0.0.1", port))
    serve(
        plan,
        Access(root),
        Hosts("127.0.0.1"),
        listening,
        root=root,
        when_up=lambda: None,
        families=families,
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="kills of each kind")
    parser.add_argument("--demo", action="store_true", help="the demo model, not the fake family")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        _serve(args.serve, args.port, demo=args.demo)
        return 0
    with tempfile.TemporaryDirectory(prefix="h3-chaos-") as root:
        count = run(Path(root), args.times, demo=args.demo, say=print)
    for problem in (*count.lost, *count.orphans):
        print(problem)
    numbers = {"times": args.times, "lost": len(count.lost), "orphans": len(count.orphans)}
    numbers |= {"first_mib": count.mib[0], "last_mib": count.mib[-1], "grown": count.grown}
    print(json.dumps(numbers))
    return int(bool(count.lost or count.orphans or count.grown))


if __name__ == "__main__":
    sys.exit(main())
