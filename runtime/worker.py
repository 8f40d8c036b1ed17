"""What one rank runs: load the family once, then serve requests until told to stop."""

from __future__ import annotations

import gc
import importlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch

from runtime.cancel import Cancelled
from runtime.clock import END_TO_END, LOAD, StageClock
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
from runtime.nonfinite import NonFinite


class Pipeline(Protocol):
    """What a family's `load(plan, progress=...)` returns."""

    resolved: dict[str, str]
    load_seconds: float
    load_gib_per_s: float

    def generate(
        self,
        request: Ref2VARequest,
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


class Worker:
    """One rank. Rank 0 sends every event; another rank only ever sends its own Failure."""

    def __init__(
        self, plan: Plan, families: Mapping[str, str], rank: int, world: int, pipe: Connection
    ) -> None:
        self._plan = plan
        self._families = families
        self._rank = rank
        self._world = world
        self._pipe = pipe
        self._waiting: deque[Command | None] = deque()
        self._cancels: set[str] = set()
        self._emitting = threading.RLock()  # previews come from a thread of their own

    def serve(self) -> None:
        """Loads, then answers commands; returns on None, or when the console has gone."""
        try:
            pipeline = self._load()
            while pipeline is not None and (command := self._next()) is not None:
                if isinstance(command, Cancel):  # it overtook its request, or came too late
                    self._cancels.add(command.request_id)
                else:
                    self._serve_one(pipeline, command)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the console died; nobody is left to tell

    def _load(self) -> Pipeline | None:
        failure: Failure
        try:
            if self._plan.threads:
                torch.set_num_threads(self._plan.threads)
            pipeline: Pipeline = self._family().load(self._plan, progress=self._loading)
            # what was loaded stays: a full collection took 0.2 s, mostly of modules and functions
            gc.collect()
            gc.freeze()
        except Exception as error:
            failure = _failure("", LOAD, error)
        else:
            self._emit(
                Ready(
                    load_seconds=pipeline.load_seconds,
                    load_gib_per_s=pipeline.load_gib_per_s,
                    resolved=pipeline.resolved,
                )
            )
            return pipeline
        self._pipe.send(failure)
        return None

    def _family(self) -> _Family:
        if self._plan.family not in self._families:
            raise ValueError(
                f"plan field family must be one of {', '.join(self._families)}, "
                f"got {self._plan.family!r}"
            )
        family: _Family = importlib.import_module(self._families[self._plan.family])
        return family

    def _loading(self, stage: str, done: int, total: int) -> None:
        self._emit(Progress(request_id="", stage=stage, done=done, total=total))

    def _serve_one(self, pipeline: Pipeline, command: Generate | Decode) -> None:
        """Runs one command; its last event leaves only after its memory is free again."""
        last = self._outcome(pipeline, command)
        self._cancels.discard(last.request_id)
        self._waiting = deque(c for c in self._waiting if c != Cancel(request_id=last.request_id))
        try:
            gc.collect()
            if isinstance(last, Failure) and torch.cuda.is_available():
                torch.cuda.empty_cache()
        finally:  # a broken CUDA context raises here: it is reported, then the rank dies of it
            if self._rank == 0 or (isinstance(last, Failure) and not last.cancelled):
                self._pipe.send(last)

    def _outcome(self, pipeline: Pipeline, command: Generate | Decode) -> Result | Failure:
        request_id = command.id if isinstance(command, Decode) else command.request.id
        clock = StageClock(self._plan.device, rank=self._rank)

        def emit(event: Event) -> None:
            with self._emitting:
                self._emit(event)
                for stage in clock.drain():
                    self._emit(stage)

        def cancelled() -> bool:
            return self._cancelled(request_id)

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
            return _failure(request_id, clock.failed, error)

    def _emit(self, event: Event) -> None:
        if self._rank == 0:
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
    def load(self, plan: Plan, *, progress: Callable[[str, int, int], None]) -> Pipeline: ...


def _failure(request_id: str, stage: str, error: Exception) -> Failure:
    return Failure(
        request_id=request_id,
        stage=stage,
        reason=sentence(error),
        details="".join(traceback.format_exception(error)),
        bad_input=isinstance(error, ValueError) and not isinstance(error, NonFinite),
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
