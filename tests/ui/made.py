"""Runs for the page tests: small jobs on the demo model, sent as a program would."""

from __future__ import annotations

import time
from typing import Any

from tests.ui.conftest import Server


def enqueue(console: Server, prompt: str, **fields: Any) -> str:
    """The id of a new small job on the demo model."""
    request = {"prompt": prompt, "width": 96, "height": 64, "frames": 22, "steps": 3, **fields}
    answer = console.api("/jobs", "POST", {"request": request, "plans": ["cpu"]})
    return str(answer["jobs"][0]["id"])


def ended(console: Server, id: str, seconds: float = 90.0) -> Any:
    """The job once it has ended."""
    deadline = time.monotonic() + seconds
    while not (job := console.api(f"/jobs/{id}"))["ended"]:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
    return job


def done(console: Server, prompt: str, **fields: Any) -> str:
    """The id of a job that ended well."""
    job = ended(console, enqueue(console, prompt, **fields))
    assert job["state"] == "done", job
    return str(job["id"])
