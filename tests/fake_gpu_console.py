"""The console over a made-up driver, to look at or to test: python -m tests.fake_gpu_console.

--case: busy (8 H200s at work), one, lost (GPU 1 of 3 is lost while you watch), mute (reports
nothing), unified (a GB10), none (no driver). Prints the address, as `launch.py serve` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from app import presets
from app.access import Access
from app.console import Console
from app.host import build_host
from app.hosts import Hosts
from app.share import Share
from panels.serve import Server, listen, mount
from tests.fake_nvml import FakeGpu, FakeNvml, busy, h200s

LOST_AFTER_SECONDS = 6.0


def _losing(nvml: FakeNvml) -> FakeNvml:
    """GPU 1 falls off the bus a while after the first reading."""
    busy(nvml)
    move, start = nvml.before_read, time.monotonic()

    def read() -> None:
        move()
        nvml.gpus[1].lost = time.monotonic() - start > LOST_AFTER_SECONDS

    nvml.before_read = read
    return nvml


def driver(case: str) -> FakeNvml:
    """The made-up driver of a case."""
    if case == "none":
        return FakeNvml(driver=False)
    if case == "lost":
        return _losing(h200s(3))
    if case == "mute":
        return FakeNvml([FakeGpu(index=0, links=0, unsupported={"*"})])
    if case == "unified":
        gpu = FakeGpu(index=0, name="NVIDIA GB10", links=0)
        gpu.unsupported = {"nvmlDeviceGetMemoryInfo", "field 197", "field 198", "field 82"}
        return busy(FakeNvml([gpu]))
    return busy(h200s(1 if case == "one" else 8))


def main() -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser()
    cases = ("busy", "one", "lost", "mute", "unified", "none")
    parser.add_argument("--case", choices=cases, default="busy")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--runs", type=Path, required=True)
    args = parser.parse_args()
    plan = presets.load_plan(presets.find("plans", "cpu"))
    with ExitStack() as opened:
        uploads = opened.enter_context(tempfile.TemporaryDirectory(prefix="h3-gradio-"))
        listening = opened.enter_context(listen("127.0.0.1", args.port))
        console = opened.enter_context(Console(args.runs, plan, nvml=driver(args.case)))
        access, hosts = Access(args.runs), Hosts("127.0.0.1")
        share = Share(console.hub, hosts)
        opened.callback(share.close)
        app = mount(build_host(console, access, hosts, share), console, access, Path(uploads))
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        with suppress(KeyboardInterrupt):
            Server(app, console).run(sockets=[listening])


if __name__ == "__main__":
    main()
