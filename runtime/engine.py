"""The resident engine: one process per GPU, typed events out; importing it never imports torch."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from runtime.families import FAMILIES
from runtime.lifeline import die_with_parent
from runtime.messages import (
    Cancel,
    Command,
    Decode,
    Event,
    Failure,
    Generate,
    Plan,
    Progress,
    Ready,
    Ref2VARequest,
    Result,
)


def _rank_main(
    plan: Plan, families: Mapping[str, str], rank: int, world: int, pipe: Connection, parent: int
) -> None:
    # Ctrl-C and the SIGTERM of a service manager reach us as Cancel, from the console.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent(parent)
    from runtime.worker import Worker  # torch starts here, in the child

    Worker(plan, families, rank, world, pipe).serve()


class Engine:
    """Owns the ranks of one Plan. One request at a time; only rank 0 speaks.

    `start`, `generate` and `decode` are to be called from one thread, which must outlive the ranks
    (the kernel kills them with the thread that spawned them). `cancel` and `kill` may come from
    any thread.
    """

    def __init__(
        self, plan: Plan, *, families: Mapping[str, str] = FAMILIES, ranks: int = 1
    ) -> None:
        self.plan = plan
        self._families = dict(families)
        self._world = ranks
        self._ranks: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
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
        self, request: Ref2VARequest, *, out: Path, media: bool = True, preview: bool = True
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
        for rank in self._ranks:
            rank.join(grace_seconds)
        self._kill_ranks()
        with self._changing:
            for rank, pipe in zip(self._ranks, self._pipes, strict=True):
                rank.join()
                rank.close()
                pipe.close()
            self._ranks, self._pipes, self._unfinished = [], [], ""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # a rank that is loading would not hear the question
            self.kill()
        self.close()

    def _spawn(self) -> None:
        context = mp.get_context("spawn")
        # Blocked while the child's Python starts, or Ctrl-C would hit it before it can ignore it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self._world):
                ours, theirs = context.Pipe()
                args = (self.plan, self._families, rank, self._world, theirs, os.getpid())
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
            if isinstance(event, int):
                event = self._death(request_id, stage, event)
            if isinstance(event, Progress):
                stage = event.stage
            last = isinstance(event, Ready | Result | Failure)
            if last:
                self._unfinished = ""
            yield event
            if last:
                return

    def _receive(self) -> Event | int:
        """The next event, or the number of a rank that died."""
        while True:
            ready = wait([*self._pipes, *(rank.sentinel for rank in self._ranks)])
            for number, (rank, pipe) in enumerate(zip(self._ranks, self._pipes, strict=True)):
                if pipe not in ready and rank.sentinel not in ready:
                    continue
                try:
                    event: Event = pipe.recv()
                except (EOFError, OSError):
                    return number
                return event

    def _death(self, request_id: str, stage: str, number: int) -> Failure:
        """One rank's death ends all ranks: a process group with a missing member hangs."""
        self._ranks[number].join(5.0)
        died = f"rank {number} died ({_exit_words(self._ranks[number].exitcode)})"
        self._kill_ranks()
        for rank in self._ranks:
            rank.join()
        what = "the engine was stopped" if self._stopped else died
        return Failure(
            request_id=request_id,
            stage=stage,
            reason=f"{what} during {stage}; the engine must be started again",
        )


def _exit_words(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return f"exit code {code}: killed, often by the kernel when memory runs out"
    if code is not None and code < 0:
        return f"exit code {code}: {signal.strsignal(-code)}"
    return f"exit code {code}"
