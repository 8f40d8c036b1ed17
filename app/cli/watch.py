"""Runs the engine for one command: bar, notes, Ctrl-C, and the last event."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from app.cli.progress import Bar
from runtime.engine import Engine
from runtime.messages import Event, Failure, Note, Progress, Ready, Result

OK, FAILED, BAD_INPUT, CANCELLED = 0, 1, 2, 130


def load(engine: Engine, bar: Bar) -> Ready | Failure:
    """Starts the engine; Ctrl-C or SIGTERM while it loads kills it: a cancelled Failure."""
    try:
        for event in engine.start():
            if isinstance(event, Progress):
                bar.draw(event)
            if isinstance(event, Ready | Failure):
                bar.close()
                return event
    except KeyboardInterrupt:
        engine.kill()
        bar.close()
        return Failure(request_id="", stage="load", reason="cancelled", cancelled=True)
    raise AssertionError("the last event of a start is Ready or Failure")


def follow(
    engine: Engine,
    request_id: str,
    events: Iterator[Event],
    bar: Bar,
    add: Callable[[Event], None],
) -> Result | Failure:
    """Shows the events of one request; the first Ctrl-C cancels it, the second kills the engine.

    SIGTERM counts as Ctrl-C.
    """
    with _interrupts(engine, request_id, bar):
        for event in events:
            add(event)
            if isinstance(event, Progress):
                bar.draw(event)
            if isinstance(event, Note):
                bar.say(f"{'warning' if event.warning else 'note'}: {event.text}")
            if isinstance(event, Result | Failure):
                bar.close()
                return event
    raise AssertionError("the last event of a request is Result or Failure")


def status(command: str, last: Ready | Result | Failure) -> int:
    """The exit status of a last event; a failure is told in one sentence on stderr."""
    if not isinstance(last, Failure):
        return OK
    if last.cancelled:
        print(f"launch.py {command}: cancelled during {last.stage}", file=sys.stderr)
        return CANCELLED
    where = "" if last.bad_input else f"{last.stage}: "
    print(f"launch.py {command}: {where}{last.reason}", file=sys.stderr)
    return BAD_INPUT if last.bad_input else FAILED


@contextmanager
def _interrupts(engine: Engine, request_id: str, bar: Bar) -> Iterator[None]:
    count = 0

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        # In a thread, because this one may be inside the very lock that sending takes.
        stop = engine.kill if count > 1 else lambda: engine.cancel(request_id)
        threading.Thread(target=stop).start()
        if count == 1:
            bar.say("cancelling after this step; press Ctrl-C again to kill the engine")

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
