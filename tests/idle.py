"""What an idle console costs with one page open: python -m tests.idle.

The last line is JSON with RSS and CPU of the console's process; exit status 1 over 300 MB or 2 %.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
MOST_BYTES = 300_000_000
MOST_CPU_PERCENT = 2.0


def run(seconds: float) -> dict[str, Any]:
    """Serves the demo model, opens a page's requests and its event stream, and looks on."""
    with _console() as (process, port):
        _get(port, "/").close()
        stream = _get(port, "/api/v1/events")
        began, before = time.monotonic(), process.cpu_times()
        time.sleep(seconds)
        after, took = process.cpu_times(), time.monotonic() - began
        rss = process.memory_info().rss
        stream.close()
        torch = any("torch" in Path(entry.path).name for entry in process.memory_maps())
    used = after.user + after.system - before.user - before.system
    return {
        "rss_bytes": rss,
        "cpu_percent": round(100 * used / took, 2),
        "seconds": round(took, 1),
        "torch_loaded": torch,
    }


def _get(port: int, path: str) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 200, path
    answer.readline()
    return connection


@contextmanager
def _console() -> Iterator[tuple[psutil.Process, int]]:
    """`launch.py serve`, once its engine is ready."""
    with tempfile.TemporaryDirectory(prefix="h3-idle-") as runs:
        command = [sys.executable, "launch.py", "serve", "--port", "0", "--runs", runs]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                match = re.search(r"http://127\.0\.0\.1:(\d+)", server.stdout.readline())
                assert match, "the console did not start"
                _wait_ready(int(match[1]))
                yield psutil.Process(server.pid), int(match[1])
            finally:
                server.terminate()
                server.wait(60)


def _wait_ready(port: int) -> None:
    state = ""
    while state != "ready":
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/api/v1/health")
        state = json.loads(connection.getresponse().read())["engine"]["state"]
        assert state != "failed"
        time.sleep(0.2)


def main() -> int:
    """The command; exit status 0 within the limits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0, help="to look on")
    report = run(parser.parse_args().seconds)
    print(json.dumps(report))
    over = report["rss_bytes"] > MOST_BYTES or report["cpu_percent"] > MOST_CPU_PERCENT
    return 1 if over or report["torch_loaded"] else 0


if __name__ == "__main__":
    sys.exit(main())
