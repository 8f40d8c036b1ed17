"""One SQLite file that one process owns: its lock, its schema, its transactions."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from runtime.media.files import DiskFullError


class Database:
    """<root>/console.sqlite3; every method may be called from any thread.

    A change is on the disk when its transaction ends: WAL with synchronous=FULL survives a power
    cut, not only a kill, and costs a few milliseconds for each of a job's few changes of state.
    """

    def __init__(self, root: Path, *, tables: str, schema: int) -> None:
        """Opens or makes the file; ValueError if another console has it or it cannot be read."""
        root.mkdir(parents=True, exist_ok=True)
        self.path = root / "console.sqlite3"
        self.lock = threading.RLock()
        self._folder_lock = _only_console(root)
        try:
            self._connection = sqlite3.connect(
                self.path, check_same_thread=False, isolation_level=None
            )
            self._connection.row_factory = sqlite3.Row
            self._open(tables, schema)
        except sqlite3.DatabaseError as error:
            self._folder_lock.close()
            raise ValueError(
                f"{self.path} cannot be used ({error}); move it away and start again: the run "
                "folders stay and are found again"
            ) from error
        except ValueError:
            self._connection.close()
            self._folder_lock.close()
            raise

    def close(self) -> None:
        """Lets another console use the folder; may be called again."""
        with self.lock:
            self._connection.close()
            self._folder_lock.close()

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """All rows of a query; OSError if the file cannot be read."""
        with self.lock, self._told():
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, all or nothing; may be entered again by the thread that is in it.

        DiskFullError, or another OSError, if the disk does not take it.
        """
        with self.lock:
            if self._connection.in_transaction:
                yield self._connection
                return
            with self._told():
                try:
                    self._connection.execute("BEGIN IMMEDIATE")
                    yield self._connection
                    self._connection.execute("COMMIT")
                finally:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the disk or a damaged file does to us, as OSError; faults of ours stay theirs."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if type(error) not in (sqlite3.OperationalError, sqlite3.DatabaseError):
                raise
            if "full" in str(error):
                raise DiskFullError(self.path) from error
            raise OSError(f"{self.path} cannot be used: {error}") from error

    def _open(self, tables: str, schema: int) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, schema):
            raise ValueError(
                f"{self.path} was written by another version of the console (schema {version}, "
                f"this one reads {schema}); use that version, or another folder with --runs"
            )
        damage = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage.splitlines()[-1])
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        if version == 0:
            self._connection.executescript(
                f"BEGIN IMMEDIATE;{tables}PRAGMA user_version = {schema};COMMIT;"
            )


def _only_console(root: Path) -> IO[str]:
    """Holds <root>/console.lock as long as this process lives; the kernel frees it at any end."""
    file = (root / "console.lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        pid = file.read().strip()
        file.close()
        raise ValueError(
            f"another console (process {pid or 'unknown'}) uses {root}; stop it or choose another "
            "folder with --runs"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
