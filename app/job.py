"""One job: what it is, how far it is, and its row in the job store."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any, Literal

from app import stored
from runtime.messages import Plan, Request

Kind = Literal["generate", "parity"]
State = Literal["queued", "running", "cancelling", "done", "failed", "cancelled", "interrupted"]

OPEN: tuple[State, ...] = ("queued", "running", "cancelling")
ENDED: tuple[State, ...] = ("done", "failed", "cancelled", "interrupted")

SCHEMA = 1  # also counts up when a field of Plan or of a request goes away
TABLES = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, state TEXT NOT NULL,
    position REAL NOT NULL, request TEXT, task TEXT NOT NULL, plan TEXT NOT NULL,
    plan_name TEXT NOT NULL, prompt TEXT NOT NULL, job_group TEXT NOT NULL, parent TEXT NOT NULL,
    keep_latents INTEGER NOT NULL, created REAL NOT NULL, started REAL NOT NULL,
    ended REAL NOT NULL, stage TEXT NOT NULL, done INTEGER NOT NULL, total INTEGER NOT NULL,
    reason TEXT NOT NULL, attempt INTEGER NOT NULL, times TEXT NOT NULL
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, position);
CREATE INDEX jobs_by_age ON jobs (created, id);
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO settings VALUES ('paused', '0');
"""
_TEXTS = ("id", "kind", "owner", "state", "parent", "stage", "reason")
_PLAIN = (*_TEXTS, "position", "created", "started", "ended", "done", "total", "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job and how far it is; all times are seconds since the epoch, 0 while unknown."""

    id: str
    kind: Kind
    owner: str
    plan: Plan  # as it was when enqueued
    request: Request | None = None  # of a "generate"
    task: dict[str, Any]  # of a "parity"; {} for generate
    state: State = "queued"
    position: float = 0.0  # of the queue; given by the store
    group: str = ""  # both halves of an A/B carry the same
    parent: str = ""  # retried or duplicated from
    keep_latents: bool = True
    created: float
    started: float = 0.0
    ended: float = 0.0
    stage: str = ""
    done: int = 0
    total: int = 0
    reason: str = ""
    attempt: int = 1

    @property
    def over(self) -> bool:
        """Nothing more will happen to it."""
        return self.state in ENDED


def row_of(job: Job) -> dict[str, Any]:
    """The columns of a job."""
    return {name: getattr(job, name) for name in _PLAIN} | {
        "request": None if job.request is None else stored.dump(job.request),
        "task": json.dumps(job.task, ensure_ascii=False),
        "plan": stored.dump(job.plan),
        "plan_name": job.plan.name,
        "prompt": "" if job.request is None else job.request.prompt,
        "job_group": job.group,
        "keep_latents": int(job.keep_latents),
    }


def job_of(row: sqlite3.Row) -> Job:
    """A job from its columns."""
    fields = {name: row[name] for name in _PLAIN}
    return Job(
        **fields,
        request=None if row["request"] is None else stored.request_of(json.loads(row["request"])),
        task=json.loads(row["task"]),
        plan=stored.plan_of(json.loads(row["plan"])),
        group=row["job_group"],
        keep_latents=bool(row["keep_latents"]),
    )
