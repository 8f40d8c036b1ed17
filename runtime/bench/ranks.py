"""A benchmark's subject on several ranks: this process is rank 0 and starts the others."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
import threading
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
from runtime.lifeline import die_with_parent
from runtime.team import Meeting, Team, meet
from runtime.worker import sentence

_LOOPBACK = "lo"


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
        others = [
            context.Process(
                target=_other, args=(setup, replace(meeting, rank=r, local=r), os.getpid())
            )
            for r in range(1, ranks)
        ]
        for other in others:
            other.daemon = True
            other.start()
        sentinels = [other.sentinel for other in others]
        threading.Thread(target=_end_with, args=(sentinels,), daemon=True).start()
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


def _taken(subject: PlanSubject, team: Team) -> Turn:
    turn = subject.turn()
    bytes_and_parts = team.collect((turn.peak_allocated_bytes, turn.parts))
    peaks, parts = zip(*bytes_and_parts, strict=True)
    return replace(turn, rank_peak_bytes=peaks, rank_parts=parts)


def _other(setup: Setup, meeting: Meeting, parent: int) -> None:
    """Another rank, until rank 0 ends: the kernel ends it too."""
    die_with_parent(parent)
    try:
        team = meet(meeting, setup.plan)
        subject = PlanSubject(replace(setup, out=Path()), team)
        while True:
            if team.share(lambda: "turn") == "turn":
                _taken(subject, team)
            else:
                subject.short_turn()
    except Exception as error:
        traceback.print_exc()
        print(f"rank {meeting.rank}: {sentence(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # nothing of a broken group is waited for


def _end_with(sentinels: list[int]) -> None:
    """Without one of its ranks the subject would wait for ever."""
    with suppress(OSError):
        wait(sentinels)
        os._exit(1)
