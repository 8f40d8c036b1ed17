"""A benchmark's subject on several ranks: this process is rank 0 and starts the others."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from runtime.bench.base import Setup, Turn
from runtime.bench.ours import PlanSubject
from runtime.layouts import Layout
from runtime.lifeline import die_with_parent, leave
from runtime.team import Meeting, Team, meet
from runtime.worker import sentence

_LOOPBACK = "lo"
_ENDING_SECONDS = 10.0  # of all ranks: less than app.bench_child waits


class RanksSubject:
    """Every rank takes the same turns; rank 0's is told, with the memory and parts of all."""

    def __init__(self, setup: Setup) -> None:
        ranks = Layout.parse(setup.plan.layout).ranks
        place = None if setup.scratch == Path() else setup.scratch
        # Kept: groups and windows that are made later meet there too, and wait where it is gone.
        self._folder = tempfile.TemporaryDirectory(prefix="h3-ranks-", dir=place)
        store = f"file://{self._folder.name}/store"
        meeting = Meeting(ranks=ranks, store=store, interface=_LOOPBACK)
        context = mp.get_context("spawn")
        self._others = [
            context.Process(
                target=_other, args=(setup, replace(meeting, rank=r, local=r), os.getpid())
            )
            for r in range(1, ranks)
        ]
        for other in self._others:
            other.daemon = True
            other.start()
        self._closing = threading.Event()
        sentinels = [other.sentinel for other in self._others]
        told = (sentinels, self._closing)
        threading.Thread(target=_end_with, args=told, daemon=True).start()
        self._team = meet(meeting, setup.plan)
        self._subject = PlanSubject(setup, self._team)
        self.facts: Mapping[str, Any] = self._subject.facts

    @property
    def rows(self) -> int:
        """S of the last turn."""
        return self._subject.rows

    def turn(self) -> Turn:
        """One of every rank."""
        self._team.share(lambda: "turn")
        return _taken(self._subject, self._team)

    def profile(self) -> Mapping[str, Any]:
        """Rank 0's step under the profiler while the others do theirs."""
        self._team.share(lambda: "profile")
        return self._subject.profile()

    def close(self) -> None:
        """Ends the other ranks; RuntimeError names those that do not, or with another status."""
        self._closing.set()  # from here on it is no death that one ends
        self._team.share(lambda: "close")
        self._team.close()
        until = time.monotonic() + _ENDING_SECONDS
        for other in self._others:
            other.join(max(0.0, until - time.monotonic()))
        codes = [other.exitcode for other in self._others]
        said = [
            f"rank {rank} " + ("did not end" if code is None else f"ended with status {code}")
            for rank, code in enumerate(codes, 1)
            if code != 0
        ]
        if said:
            raise RuntimeError(f"after its last turn {', '.join(said)}")


def _taken(subject: PlanSubject, team: Team) -> Turn:
    turn = subject.turn()
    bytes_and_parts = team.collect((turn.peak_allocated_bytes, turn.parts))
    peaks, parts = zip(*bytes_and_parts, strict=True)
    return replace(turn, rank_peak_bytes=peaks, rank_parts=parts)


def _other(setup: Setup, meeting: Meeting, parent: int) -> None:
    """Another rank, until rank 0 closes, or ends: then the kernel ends it too."""
    die_with_parent(parent)
    try:
        team = meet(meeting, setup.plan)
        subject = PlanSubject(replace(setup, out=Path()), team)
        while (told := team.share(lambda: "close")) != "close":
            if told == "turn":
                _taken(subject, team)
            else:
                subject.short_turn()
        team.close()
        leave(0)
    except Exception as error:
        traceback.print_exc()
        print(f"rank {meeting.rank}: {sentence(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # nothing of a broken group is waited for


def _end_with(sentinels: list[int], closing: threading.Event) -> None:
    """Without one of its ranks the subject would wait for ever, unless it waits for their end."""
    with suppress(OSError):
        wait(sentinels)
        if not closing.is_set():
            os._exit(1)
