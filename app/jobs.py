"""The jobs of one runs folder in SQLite: the queue, the history, and what survives any kill."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from app import stored
from app.database import Database
from app.errors import Missing, WrongState
from app.job import ENDED, OPEN, SCHEMA, TABLES, Job, Kind, State, job_of, row_of
from runtime.messages import Plan, Request
from runtime.quoted import quoted

__all__ = ["ENDED", "OPEN", "Job", "JobStore", "Kind", "State"]

_CHANGEABLE = ("state", "started", "ended", "stage", "done", "total", "reason", "times")
_CACHED = 1024  # decoded jobs kept; only this process writes, so a write drops exactly its own


class JobStore:
    """The jobs of `root`; every method may be called from any thread.

    Every change is on the disk when its method returns, but for `progress`, which is only told
    while the job runs. OSError if the disk does not take a change.
    """

    def __init__(self, root: Path) -> None:
        """Opens or makes <root>/console.sqlite3; ValueError if another console uses the folder."""
        self._db = Database(root, tables=TABLES, schema=SCHEMA)
        self._cache: dict[str, Job] = {}
        self._progress: dict[str, tuple[str, int, int]] = {}

    def close(self) -> None:
        """Lets another console use the folder; may be called again."""
        self._db.close()

    def __enter__(self) -> JobStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- reading

    def get(self, id: str) -> Job | None:
        """The job of an id."""
        with self._db.lock:
            if (job := self._cache.get(id)) is None:
                rows = self._jobs("SELECT * FROM jobs WHERE id = ?", (id,))
                return rows[0] if rows else None
            return self._current(job)

    def need(self, id: str) -> Job:
        """The job of an id; Missing without one."""
        job = self.get(id)
        if job is None:
            raise Missing(f"there is no job {quoted(id)}; it may have been deleted")
        return job

    def queue(self) -> tuple[Job, ...]:
        """What runs, then what waits in the order it will run."""
        return self._jobs(
            f"SELECT * FROM jobs WHERE state IN {OPEN} ORDER BY state = 'queued', position",
            (),
        )

    def waiting(self, owner: str | None = None) -> int:
        """How many jobs wait, of everyone or of one owner."""
        clause, values = ("", ()) if owner is None else (" AND owner = ?", (owner,))
        sql = f"SELECT count(*) FROM jobs WHERE state = 'queued'{clause}"
        return int(self._db.rows(sql, values)[0][0])

    def ids(self) -> frozenset[str]:
        """Of every job."""
        return frozenset(row["id"] for row in self._db.rows("SELECT id FROM jobs"))

    def counts(self) -> dict[tuple[str, str], int]:
        """How many jobs there are by (kind, state)."""
        sql = "SELECT kind, state, count(*) FROM jobs GROUP BY kind, state"
        return {(row[0], row[1]): row[2] for row in self._db.rows(sql)}

    def times(self) -> Iterator[tuple[Job, dict[str, float]]]:
        """The newest thousand done jobs with the seconds of their stages, oldest first."""
        sql = (
            "SELECT id, times FROM jobs WHERE state = 'done' AND times != '{}' "
            "ORDER BY ended DESC LIMIT 1000"
        )
        for row in reversed(self._db.rows(sql)):
            if (job := self.get(row["id"])) is not None:
                yield job, json.loads(row["times"])

    def list(
        self,
        states: Iterable[State] = (),
        kinds: Iterable[Kind] = (),
        owner: str | None = None,
        text: str = "",
        limit: int = 200,
        before: str | None = None,
        *,
        plan: str = "",
        since: float | None = None,
        until: float | None = None,
    ) -> tuple[Job, ...]:
        """The newest first; empty filters let everything through.

        text: found in prompt or id, in any case. before: continues after the job of that id.
        since, until: bounds of `created`, in seconds since the epoch.
        """
        where: dict[str, tuple[Any, ...]] = {}
        for column, allowed in (("state", tuple(states)), ("kind", tuple(kinds))):
            if allowed:
                where[f"{column} IN ({', '.join('?' * len(allowed))})"] = allowed
        if owner is not None:
            where["owner = ?"] = (owner,)
        if plan:
            where["plan_name = ?"] = (plan,)
        if since is not None:
            where["created >= ?"] = (since,)
        if until is not None:
            where["created < ?"] = (until,)
        if text:
            pattern = "%" + "".join(f"\\{c}" if c in "%_\\" else c for c in text) + "%"
            where["(prompt LIKE ? ESCAPE '\\' OR id LIKE ? ESCAPE '\\')"] = (pattern, pattern)
        if before is not None:
            where["(created, id) < (?, ?)"] = (self.need(before).created, before)
        clause = " WHERE " + " AND ".join(where) if where else ""
        values = [value for group in where.values() for value in group]
        return self._jobs(
            f"SELECT * FROM jobs{clause} ORDER BY created DESC, id DESC LIMIT ?", (*values, limit)
        )

    # ---- the queue

    def add(self, *jobs: Job, times: dict[str, float] | None = None) -> tuple[Job, ...]:
        """Puts jobs at the end of the queue, next to each other: all of them or none."""
        with self._db.writing() as db:
            last = db.execute("SELECT coalesce(max(position), 0) FROM jobs").fetchone()[0]
            placed = tuple(replace(job, position=last + n + 1) for n, job in enumerate(jobs))
            for job in placed:
                row = row_of(job) | {"times": json.dumps(times or {})}
                marks = ", ".join(f":{name}" for name in row)
                db.execute(f"INSERT INTO jobs ({', '.join(row)}) VALUES ({marks})", row)
        return placed

    def claim(self) -> Job | None:
        """The next job, now running; None if nothing waits or the queue is paused."""
        with self._db.writing() as db:
            row = db.execute(
                "UPDATE jobs SET state = 'running', started = ?, stage = 'start' WHERE id = "
                "(SELECT id FROM jobs WHERE state = 'queued' ORDER BY position LIMIT 1) "
                "AND (SELECT value FROM settings WHERE name = 'paused') = '0' RETURNING id",
                (time.time(),),
            ).fetchone()
            if row is None:
                return None
            self._cache.pop(row["id"], None)
        return self.get(row["id"])

    def move(self, id: str, before: str | None, *, owner: str | None = None) -> None:
        """Puts a waiting job before another one, or last.

        owner: whose places are shared out anew, so that nobody overtakes somebody else's job.
        """
        with self._db.writing() as db:
            mine = [j for j in self.queue() if j.state == "queued" and owner in (None, j.owner)]
            order = [job.id for job in mine]
            for wanted in (id, before):
                if wanted is not None and wanted not in order:
                    self.need(wanted)
                    raise WrongState(f"job {wanted} does not wait in your queue")
            if id == before:
                return
            order.remove(id)
            order.insert(len(order) if before is None else order.index(before), id)
            if owner is None:
                _place_between(db, {job.id: job.position for job in mine}, order, id)
            else:
                for place, moved in zip((job.position for job in mine), order, strict=True):
                    db.execute("UPDATE jobs SET position = ? WHERE id = ?", (place, moved))
            self._cache.clear()

    def edit(self, id: str, *, request: Request | None = None, plan: Plan | None = None) -> Job:
        """Another request or plan for a job that waits; WrongState once it has begun."""
        changes: dict[str, Any] = {}
        if request is not None:
            changes |= {"request": stored.dump(request), "prompt": request.prompt}
        if plan is not None:
            changes |= {"plan": stored.dump(plan), "plan_name": plan.name}
        if changes and not self._change(id, changes, ("queued",)):
            job = self.need(id)
            raise WrongState(f"job {id} is {job.state}; only a waiting job can be edited")
        return self.need(id)

    # ---- a job's way

    def update(self, id: str, *, only: Iterable[State] = (), **changes: Any) -> bool:
        """Changes fields of a job; `only`: in these states, else nothing is done and False told."""
        assert set(changes) <= set(_CHANGEABLE), changes
        if "times" in changes:
            changes["times"] = json.dumps(changes["times"])
        with self._db.lock:
            done = self._change(id, changes, tuple(only))
            if done and changes.get("state") in ENDED:
                self._progress.pop(id, None)
            return done

    def progress(self, id: str, stage: str, done: int, total: int) -> None:
        """How far a running job is; kept in memory, `update` stores it when the job ends."""
        with self._db.lock:
            self._progress[id] = (stage, done, total)

    def remove(self, id: str) -> None:
        """Forgets a job that does not run; WrongState for one that does."""
        with self._db.writing() as db:
            job = self.need(id)
            if job.state in ("running", "cancelling"):
                raise WrongState(f"job {id} is {job.state}; cancel it before it is deleted")
            db.execute("DELETE FROM jobs WHERE id = ?", (id,))
            self._cache.pop(id, None)

    @property
    def paused(self) -> bool:
        """No waiting job is begun; survives a restart."""
        sql = "SELECT value FROM settings WHERE name = 'paused'"
        return bool(self._db.rows(sql)[0][0] == "1")

    @paused.setter
    def paused(self, value: bool) -> None:
        with self._db.writing() as db:
            db.execute("UPDATE settings SET value = ? WHERE name = 'paused'", (str(int(value)),))

    # ---- inside

    def _change(self, id: str, changes: dict[str, Any], only: tuple[State, ...]) -> bool:
        clause = f" AND state IN ({', '.join('?' * len(only))})" if only else ""
        pairs = ", ".join(f"{name} = ?" for name in changes)
        with self._db.writing() as db:
            self._cache.pop(id, None)
            sql = f"UPDATE jobs SET {pairs} WHERE id = ?{clause}"
            return db.execute(sql, (*changes.values(), id, *only)).rowcount == 1

    def _jobs(self, sql: str, values: tuple[Any, ...]) -> tuple[Job, ...]:
        with self._db.lock:
            rows = self._db.rows(sql, values)
            if len(self._cache) > _CACHED:
                self._cache.clear()
            for row in rows:
                if row["id"] not in self._cache:
                    self._cache[row["id"]] = job_of(row)
            return tuple(self._current(self._cache[row["id"]]) for row in rows)

    def _current(self, job: Job) -> Job:
        if (now := self._progress.get(job.id)) is None:
            return job
        return replace(job, stage=now[0], done=now[1], total=now[2])


def _place_between(
    db: sqlite3.Connection, places: dict[str, float], order: list[str], id: str
) -> None:
    """A position between the neighbours of `id`; everyone gets a new one when none is left."""
    if len(order) == 1:
        return
    index = order.index(id)
    low = places[order[index - 1]] if index else places[order[index + 1]] - 2.0
    high = places[order[index + 1]] if index + 1 < len(order) else low + 2.0
    middle = (low + high) / 2
    if low < middle < high:
        db.execute("UPDATE jobs SET position = ? WHERE id = ?", (middle, id))
        return
    for n, moved in enumerate(order):
        db.execute("UPDATE jobs SET position = ? WHERE id = ?", (float(n + 1), moved))
