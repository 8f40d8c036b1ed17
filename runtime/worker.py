"""What one rank runs: load the family once, then serve requests until told to stop."""

from __future__ import annotations

import gc
import importlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from runtime.cancel import Cancelled
from runtime.clock import END_TO_END, LOAD, VIDEO_VAE_DECODE, StageClock, Watched, unwatched
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
from runtime.nonfinite import NonFinite
from runtime.pulse import Heart
from runtime.quoted import quoted
from runtime.team import ALONE, Meeting, Team, meet


class Pipeline(Protocol):
    """What a family's `load(plan, progress=..., team=...)` returns."""

    resolved: dict[str, str]
    load_seconds: float
    load_gib_per_s: float

    def generate(
        self,
        request: Request,
        *,
        out: Path,
        media: bool,
        preview: bool,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> Result:
        """Writes latents (and with `media` an mp4) into `out`; raises Cancelled when asked to.

        `emit` may be called from any thread.
        """

    def decode(
        self,
        request_id: str,
        latents: Path,
        *,
        out: Path,
        emit: Callable[[Event], None],
        cancelled: Callable[[], bool],
        clock: StageClock,
    ) -> Result:
        """Decodes a latents file to the mp4 `out`."""


class Pipe(Protocol):
    """The end of a multiprocessing pipe to the engine, or what stands for it."""

    def poll(self) -> bool: ...
    def recv(self) -> Command | None: ...
    def send(self, said: Event | Beat | Idle, /) -> None: ...


class Worker:
    """One rank. Rank 0 sends every event; another rank only ever sends its own Failure.

    Of several ranks each also sends its Beats, and Idle whenever it has left a command.
    """

    def __init__(
        self, plan: Plan, families: Mapping[str, str], meeting: Meeting, pipe: Pipe
    ) -> None:
        self._plan = plan
        self._families = families
        self._meeting = meeting
        self._rank = meeting.rank
        self._pipe = pipe
        self._waiting: deque[Command | None] = deque()
        self._cancels: set[str] = set()
        self._emitting = threading.RLock()  # previews and beats come from threads of their own
        self._team: Team = ALONE

    def serve(self) -> None:
        """Loads, then answers commands; returns on None, or when the console has gone."""
        try:
            pipeline = self._load()
            while pipeline is not None and (command := self._next()) is not None:
                if isinstance(command, Cancel):  # it overtook its request, or came too late
                    self._cancels.add(command.request_id)
                else:
                    self._serve_one(pipeline, command)
            self._team.close()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the console died; nobody is left to tell

    def _load(self) -> Pipeline | None:
        failure: Failure
        try:
            with self._beating():
                pipeline = self._loaded()
        except Exception as error:
            failure = _failure("", LOAD, error, self._rank)
        else:
            self._emit(
                Ready(
                    load_seconds=pipeline.load_seconds,
                    load_gib_per_s=pipeline.load_gib_per_s,
                    resolved=pipeline.resolved,
                )
            )
            self._tell_idle()
            return pipeline
        self._say(failure)
        return None

    def _loaded(self) -> Pipeline:
        if self._plan.threads:
            torch.set_num_threads(self._plan.threads)
        family = self._family()
        self._team = meet(self._meeting, self._plan)
        pipeline: Pipeline = family.load(self._plan, progress=self._loading, team=self._team)
        # what was loaded stays: a full collection took 0.2 s, mostly of modules and functions
        gc.collect()
        gc.freeze()
        return pipeline

    def _family(self) -> _Family:
        if self._plan.family not in self._families:
            raise ValueError(
                f"plan field family must be one of {', '.join(self._families)}, "
                f"got {quoted(self._plan.family)}"
            )
        family: _Family = importlib.import_module(self._families[self._plan.family])
        return family

    def _loading(self, stage: str, done: int, total: int) -> None:
        self._emit(Progress(request_id="", stage=stage, done=done, total=total))

    def _serve_one(self, pipeline: Pipeline, command: Generate | Decode) -> None:
        """Runs one command; its last event leaves only after its memory is free again."""
        with self._beating() as heart:
            last = self._outcome(pipeline, command, heart.stage if heart else unwatched)
        self._cancels.discard(last.request_id)
        self._waiting = deque(c for c in self._waiting if c != Cancel(request_id=last.request_id))
        try:
            gc.collect()
            if isinstance(last, Failure) and torch.cuda.is_available():
                torch.cuda.empty_cache()
        finally:  # a broken CUDA context raises here: it is reported, then the rank dies of it
            if self._rank == 0 or (isinstance(last, Failure) and not last.cancelled):
                self._say(last)
        self._tell_idle()

    def _beating(self) -> AbstractContextManager[Heart | None]:
        """One of several ranks tells that it lives."""
        return Heart(self._say, VIDEO_VAE_DECODE) if self._meeting.ranks > 1 else nullcontext()

    def _tell_idle(self) -> None:
        if self._meeting.ranks > 1:
            self._say(Idle())

    def _outcome(
        self, pipeline: Pipeline, command: Generate | Decode, watched: Watched
    ) -> Result | Failure:
        request_id = command.id if isinstance(command, Decode) else command.request.id
        clock = StageClock(self._plan.device, rank=self._rank, watched=watched)

        def emit(event: Event) -> None:
            with self._emitting:
                self._emit(event)
                for stage in clock.drain():
                    self._emit(stage)

        def cancelled() -> bool:  # rank 0 decides for all
            return self._rank == 0 and self._cancelled(request_id)

        try:
            with clock.stage(END_TO_END):
                if isinstance(command, Decode):
                    result = pipeline.decode(
                        request_id,
                        command.latents,
                        out=command.out,
                        emit=emit,
                        cancelled=cancelled,
                        clock=clock,
                    )
                else:
                    result = pipeline.generate(
                        command.request,
                        out=command.out,
                        media=command.media,
                        preview=command.preview,
                        emit=emit,
                        cancelled=cancelled,
                        clock=clock,
                    )
            return replace(result, stages=clock.times())
        except Cancelled:
            return Failure(
                request_id=request_id, stage=clock.failed, reason="cancelled", cancelled=True
            )
        except Exception as error:
            return _failure(request_id, clock.failed, error, self._rank)

    def _emit(self, event: Event) -> None:
        if self._rank == 0:
            self._say(event)

    def _say(self, event: Event | Beat | Idle) -> None:
        with self._emitting:
            self._pipe.send(event)

    def _next(self) -> Command | None:
        if self._waiting:
            return self._waiting.popleft()
        command: Command | None = self._pipe.recv()
        return command

    def _cancelled(self, request_id: str) -> bool:
        """Reads what has arrived meanwhile; being told to stop cancels too."""
        while self._pipe.poll():
            self._waiting.append(self._pipe.recv())
        return request_id in self._cancels or any(
            c is None or c == Cancel(request_id=request_id) for c in self._waiting
        )


class _Family(Protocol):
    def load(
        self, plan: Plan, *, progress: Callable[[str, int, int], None], team: Team
    ) -> Pipeline: ...


def _failure(request_id: str, stage: str, error: Exception, rank: int) -> Failure:
    return Failure(
        request_id=request_id,
        stage=stage,
        reason=sentence(error),
        details="".join(traceback.format_exception(error)),
        bad_input=isinstance(error, ValueError) and not isinstance(error, NonFinite),
        rank=rank,
    )


def sentence(error: Exception) -> str:
    """The reason for a person: our own errors speak for themselves, others get their type."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    text = str(error).strip()
    if isinstance(error, ValueError | FloatingPointError | OSError) and text:
        return text
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU ran out of memory: {_first_line(text)}"
    return f"{type(error).__name__}: {_first_line(text)}" if text else type(error).__name__


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
