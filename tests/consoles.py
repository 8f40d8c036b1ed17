"""Consoles over the fake family, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fastapi.testclient import TestClient

from app import presets
from app.access import LOCAL, Access, User
from app.console import Console
from app.host import build_host
from app.hosts import Hosts
from app.jobs import Job
from app.share import Share
from runtime.messages import Plan
from tests import fakes

T = TypeVar("T")


def demo_plan(name: str = "cpu") -> Plan:
    """The fake family under the demo's files, which preflight looks for."""
    plan = presets.load_plan(presets.find("plans", "cpu"))
    return replace(plan, family="fake", name=name, threads=1)


def fake_console(root: Path) -> Console:
    """A console whose engine is the fake family."""
    return Console(root, demo_plan(), families=fakes.FAMILIES)


@contextmanager
def ltx_console(root: Path, mine: Plan) -> Iterator[Console]:
    """One whose engine is the fake family for plans of LTX too, with the plan "mine"."""
    known = {**fakes.FAMILIES, "ltx": "tests.fakes"}
    with Console(root, demo_plan(), families=known) as console:
        console.planning.plans.save("mine", mine)
        yield console


def client(console: Console, user: User = LOCAL) -> TestClient:
    """The console's REST interface as this user has it."""
    access, hosts = Access(console.root), Hosts("127.0.0.1")
    app = build_host(console, access, hosts, Share(console.hub, hosts))
    app.dependency_overrides[access.need] = lambda: user
    return TestClient(app, base_url="http://127.0.0.1")


def until(met: Callable[[], T | None], seconds: float = 90.0) -> T:
    """The first true answer."""
    deadline = time.monotonic() + seconds
    while not (answer := met()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)
    return answer


def ended(console: Console, id: str, seconds: float = 90.0) -> Job:
    """The job, once nothing more will happen to it."""
    return until(lambda: job if (job := console.jobs.need(id)).over else None, seconds)


def at_step(console: Console, id: str, step: int) -> Job:
    """The job, once it has done so many steps."""

    def there() -> Job | None:
        job = console.jobs.need(id)
        return job if job.over or (job.stage == "denoise" and job.done >= step) else None

    return until(there)
