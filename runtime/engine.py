"""The resident engine: one process per rank, typed events out; importing it never imports torch."""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

from runtime.families import FAMILIES
from runtime.layouts import Layout
from runtime.lifeline import die_with_parent
from runtime.messages import (
    Beat,
    Cancel,
    Command,
    Decode,
    Event,
    Failure,
    Generate,
    Idle,
    Plan,
    Progress,
    Ready,
    Request,
    Result,
)
from runtime.pulse import BEAT_SECONDS, SILENCE_SECONDS, START_SECONDS, Pulse

SETTLE_SECONDS = 10.0  # after the last event: for the other ranks to leave the command too
_DYING_SECONDS = 0.5
_LOOPBACK = "lo"


class Lost(NamedTuple):
    """A rank that died or hangs, and how that was seen."""

    rank: int
    why: str


def _rank_main(
    plan: Plan,
    families: Mapping[str, str],
    rank: int,
    ranks: int,
    store: str,
    pipe: Connection,
    parent: int,
) -> None:
    # Ctrl-C and the SIGTERM of a service manager reach us as Cancel, from the console.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent(parent)
    from runtime.team import Meeting  # torch starts here, in the child
    from runtime.worker import Worker

    meeting = Meeting(rank=rank, ranks=ranks, local=rank, store=store, interface=_LOOPBACK)
    Worker(plan, families, meeting, pipe).serve()


class Engine:
    """Owns the ranks of one Plan. One request at a time; only rank 0 speaks.

    `start`, `generate` and `decode` are to be called from one thread, which must outlive the ranks
    (the kernel kills them with the thread that spawned them). `cancel` and `kill` may come from
    any thread. One of several ranks that is silent for `silence_seconds` (and for three times its
    last step) hangs, as does one in a step or a tile that does not end (runtime/pulse.py): all are
    killed, as when one dies.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        families: Mapping[str, str] = FAMILIES,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self.plan = plan
        self._families = dict(families)
        self._world = Layout.parse(plan.layout).ranks
        self._ranks: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        self._meeting_place = ""  # a folder of this start
        self._silence = silence_seconds
        self._pulse = Pulse(self._world, silence_seconds, START_SECONDS)
        self._idle: set[int] = set()  # ranks that are in no command; of several ranks
        self._changing = threading.Lock()  # the ranks, their pipes, and who sends
        self._unfinished = ""  # a request whose reader went away before its last event
        self._stopped = False  # by kill, since the last start

    @property
    def alive(self) -> bool:
        """All ranks run; after a death or a failed load `start` makes new ones."""
        return bool(self._ranks) and all(rank.is_alive() for rank in self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, rank 0 first."""
        return tuple(rank.pid for rank in self._ranks if rank.pid is not None)

    def start(self) -> Iterator[Event]:
        """Spawns the ranks and loads the checkpoints; the last event is Ready or Failure."""
        self._stopped = False
        self.close()
        self._spawn()
        for event in self._events("", "load"):
            yield event
            if isinstance(event, Failure):
                self.close()

    def generate(
        self, request: Request, *, out: Path, media: bool = True, preview: bool = True
    ) -> Iterator[Event]:
        """Runs a request into the folder `out`; the last event is Result or Failure."""
        command = Generate(request=request, out=out, media=media, preview=preview)
        yield from self._run(command, request.id)

    def decode(self, request_id: str, latents: Path, *, out: Path) -> Iterator[Event]:
        """Decodes a latents file to the mp4 `out`; the last event is Result or Failure."""
        yield from self._run(Decode(id=request_id, latents=latents, out=out), request_id)

    def cancel(self, request_id: str) -> None:
        """Asks the ranks to stop this request; its last event is then a cancelled Failure.

        It may overtake its request. A load does not hear it: `kill` ends that.
        """
        self._send(Cancel(request_id=request_id))

    def kill(self) -> None:
        """Kills the ranks at once, also while they start; a waiting reader gets the Failure."""
        self._stopped = True
        self._kill_ranks()

    def close(self, *, grace_seconds: float = 5.0) -> None:
        """Ends the ranks: asks, then kills. Nothing is left running; may be called again."""
        self._send(None)
        until = time.monotonic() + grace_seconds
        for rank in self._ranks:
            rank.join(max(0.0, until - time.monotonic()))
        self._kill_ranks()
        with self._changing:
            for rank, pipe in zip(self._ranks, self._pipes, strict=True):
                rank.join()
                rank.close()
                pipe.close()
            self._ranks, self._pipes, self._unfinished = [], [], ""
        if self._meeting_place:
            shutil.rmtree(self._meeting_place)
            self._meeting_place = ""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # a rank that is loading would not hear the question
            self.kill()
        self.close()

    def _spawn(self) -> None:
        context = mp.get_context("spawn")
        store = ""
        if self._world > 1:  # anew for each start: what dead ranks left in a store would mislead
            self._meeting_place = tempfile.mkdtemp(prefix="h3-ranks-")
            store = f"file://{self._meeting_place}/store"
        self._watch_anew(START_SECONDS)
        # Blocked while the child's Python starts, or Ctrl-C would hit it before it can ignore it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self._world):
                ours, theirs = context.Pipe()
                args = (
                    *(self.plan, self._families, rank, self._world, store),
                    *(theirs, os.getpid()),
                )
                process = context.Process(
                    target=_rank_main, args=args, name=f"h3-rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                with self._changing:
                    self._ranks.append(process)
                    self._pipes.append(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if self._stopped:
            self._kill_ranks()

    def _kill_ranks(self) -> None:
        with self._changing:
            for rank in self._ranks:
                rank.kill()

    def _send(self, command: Command | None) -> None:
        with self._changing:
            for pipe in self._pipes:
                try:
                    pipe.send(command)
                except OSError:  # that rank is dead: whoever reads the events is told
                    continue

    def _run(self, command: Generate | Decode, request_id: str) -> Iterator[Event]:
        assert self._ranks, "the engine has not been started"
        if self._unfinished:
            for _ in self._events(self._unfinished, "start"):
                pass
        self._unfinished = request_id
        self._watch_anew(self._silence)
        self._send(command)
        try:
            yield from self._events(request_id, "start")
        finally:
            if self._unfinished:
                self.cancel(request_id)

    def _events(self, request_id: str, stage: str) -> Iterator[Event]:
        """Events until the last one of `request_id`; `stage` is named should a rank die."""
        while True:
            event = self._receive()
            assert event is not None
            if isinstance(event, Lost):
                last: Event = self._loss(request_id, stage, event)
            elif isinstance(event, Ready | Result | Failure):
                last = event if self._world == 1 else self._settled(event, stage)
            else:
                if isinstance(event, Progress):
                    stage = event.stage
                yield event
                continue
            self._unfinished = ""
            yield last
            return

    def _receive(self, until: float | None = None) -> Event | Lost | None:
        """The next event, or a rank that died or hangs.

        until: a monotonic time; then only ranks that are in the command count, and None is told
        once there are none or that time has come.
        """
        while until is None or (self._working and time.monotonic() < until):
            heard = range(self._world) if until is None else self._working
            sources = [(self._pipes[n], self._ranks[n].sentinel) for n in heard]
            watched = [s for pair in sources for s in pair]
            ready = wait(watched, self._patience)
            for number, pair in zip(heard, sources, strict=True):
                if not any(source in ready for source in pair):
                    continue
                event = self._read(number)
                if event is not None:
                    return event
            # what lies there unread, while our reader did something else, may tell of progress
            judged = self._world > 1 and not wait(watched, 0)
            if judged and (trouble := self._pulse.trouble(self._working)):
                return Lost(*trouble)
        return None

    def _cause(self, failure: Failure) -> Lost | None:
        """A rank that died before this failure of another, which may be no more than its echo."""
        others = [n for n in self._working if n != failure.rank]
        # a dying process closes its connections some moments before it is seen to be dead
        echo = failure.request_id and not failure.cancelled  # a rank that cannot load ends too
        if not echo or not wait([self._ranks[n].sentinel for n in others], _DYING_SECONDS):
            return None
        dead = next(n for n in others if not self._ranks[n].is_alive())
        return self._lost(dead)

    def _read(self, number: int) -> Event | Lost | None:
        """What a rank says; None for its signs of life."""
        try:
            event: Event | Beat | Idle = self._pipes[number].recv()
        except (EOFError, OSError):
            return self._lost(number)
        self._pulse.hear(number, event if isinstance(event, Beat) else None)
        if isinstance(event, Idle) or (isinstance(event, Failure) and not event.request_id):
            self._idle.add(number)  # a rank that cannot load ends by itself
            self._pulse.stop(number)
        return None if isinstance(event, Beat | Idle) else event

    def _settled(self, last: Ready | Result | Failure, stage: str) -> Ready | Result | Failure:
        """The last event once all ranks wait for a command; those that do not are killed.

        Of several failures rank 0's counts where all ranks could go on, else the first.
        """
        if isinstance(last, Failure) and (lost := self._cause(last)):
            return self._loss(last.request_id, stage, lost)
        # a rank that loads longer is waited for while it beats
        until = math.inf if isinstance(last, Ready) else time.monotonic() + SETTLE_SECONDS
        failures = [last] if isinstance(last, Failure) else []
        request_id = "" if isinstance(last, Ready) else last.request_id
        while (event := self._receive(until)) is not None:
            if isinstance(event, Lost):
                found = self._loss(request_id, stage, event)
                if isinstance(last, Ready):
                    return found
                break
            if isinstance(event, Failure):
                failures.append(event)
                until = min(until, time.monotonic() + SETTLE_SECONDS)
        ended = bool(self._working)
        if ended:
            self._kill_ranks()
        if not failures:
            return last
        told = failures[0] if ended else min(failures, key=lambda failure: failure.rank)
        return _told(told, ended=ended and bool(request_id))

    def _lost(self, number: int) -> Lost:
        self._ranks[number].join(5.0)
        return Lost(number, f"rank {number} died ({_exit_words(self._ranks[number].exitcode)})")

    @property
    def _patience(self) -> float | None:
        """Seconds after which several ranks are looked at though nobody says anything."""
        return BEAT_SECONDS if self._world > 1 else None

    @property
    def _working(self) -> list[int]:
        return [rank for rank in range(self._world) if rank not in self._idle]

    def _watch_anew(self, first_seconds: float) -> None:
        self._idle = set()
        self._pulse = Pulse(self._world, self._silence, first_seconds)

    def _loss(self, request_id: str, stage: str, lost: Lost) -> Failure:
        """One rank's death ends all ranks: a process group with a missing member hangs."""
        self._kill_ranks()
        for rank in self._ranks:
            rank.join()
        what = "the engine was stopped" if self._stopped else lost.why
        return Failure(
            request_id=request_id,
            stage=stage,
            reason=f"{what} during {stage}; the engine must be started again",
            rank=lost.rank,
        )


def _told(failure: Failure, *, ended: bool) -> Failure:
    """A failure whose sentence names another rank than 0, and says that all ranks were ended."""
    rank = f"rank {failure.rank}: " if failure.rank else ""
    again = "; the engine must be started again" if ended else ""
    return replace(failure, reason=f"{rank}{failure.reason}{again}")


def _exit_words(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return f"exit code {code}: killed, often by the kernel when memory runs out"
    if code is not None and code < 0:
        return f"exit code {code}: {signal.strsignal(-code)}"
    return f"exit code {code}"
