"""What happens in the console, told to every open page: one numbered stream that can resume."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

KEPT = 2000  # messages that a page which lost its connection can still get
MOST_WAITING = 500  # messages that a page may be behind before it has to start again
KEEP_ALIVE_SECONDS = 15.0
RETRY_MILLISECONDS = 1000

_ID = re.compile(r"([0-9a-f]+)-([0-9]{1,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One event: data is JSON text; owner "" means everybody."""

    number: int
    kind: str
    data: str
    owner: str

    def seen_by(self, name: str, *, admin: bool) -> bool:
        """Whether this user may know of it."""
        return admin or not self.owner or self.owner == name


class Hub:
    """Takes messages from any thread and gives them to the streams of one event loop each."""

    def __init__(
        self,
        *,
        kept: int = KEPT,
        most_waiting: int = MOST_WAITING,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self.boot = secrets.token_hex(4)
        self._most_waiting = most_waiting
        self._keep_alive_seconds = keep_alive_seconds
        self._lock = threading.Lock()
        self._number = 0
        self._ring: deque[Message] = deque(maxlen=kept)
        self._readers: list[_Reader] = []
        self._closed = False

    @property
    def readers(self) -> int:
        """Streams that are open now."""
        return len(self._readers)

    def publish(self, kind: str, data: dict[str, Any], owner: str = "") -> None:
        """Sends one event: to its owner and the admins, or to everybody. NaN is a ValueError."""
        text = json.dumps(data, allow_nan=False)
        with self._lock:
            self._number += 1
            message = Message(number=self._number, kind=kind, data=text, owner=owner)
            self._ring.append(message)
            for reader in self._readers:
                reader.put(message)

    def close(self) -> None:
        """Ends every stream, now and later; the server is about to stop."""
        with self._lock:
            self._closed = True
            for reader in self._readers:
                reader.wake()

    async def stream(self, name: str, *, admin: bool, last: str = "") -> AsyncIterator[str]:
        """The text of one server-sent event stream, from after the id `last` if it is given.

        A `last` that is no longer kept, or of an earlier start, gets the event `reset`: fetch
        everything anew. So does a page that has fallen too far behind, whose stream then ends.
        """
        reader = _Reader(name, admin=admin, most=self._most_waiting)
        with self._lock:
            missed = self._since(last)
            head = self._number
            self._readers.append(reader)
        try:
            yield f"retry: {RETRY_MILLISECONDS}\n\n"
            if missed is None:
                yield self._reset(head)
            if not last:  # no event, as it has no data; but the page names it when it comes back
                yield f"id: {self.boot}-{head}\n\n"
            for message in missed or ():
                if reader.sees(message):
                    yield self._text(message)
            while not self._closed:
                if not await reader.wait(self._keep_alive_seconds):
                    yield ": still here\n\n"
                    continue
                with self._lock:
                    (messages, behind), head = reader.take(), self._number
                for message in messages:
                    yield self._text(message)
                if behind:
                    yield self._reset(head)
                    return
        finally:
            with self._lock:
                self._readers.remove(reader)

    def _since(self, last: str) -> list[Message] | None:
        """What came after an id; None if some of it is gone. The lock is held."""
        if not last:
            return []
        match = _ID.fullmatch(last)
        if match is None or match[1] != self.boot or int(match[2]) > self._number:
            return None
        oldest = self._ring[0].number if self._ring else self._number + 1
        if int(match[2]) + 1 < oldest:
            return None
        return [message for message in self._ring if message.number > int(match[2])]

    def _text(self, message: Message) -> str:
        return f"id: {self.boot}-{message.number}\nevent: {message.kind}\ndata: {message.data}\n\n"

    def _reset(self, number: int) -> str:
        return f"id: {self.boot}-{number}\nevent: reset\ndata: {{}}\n\n"


class _Reader:
    """What one stream has still to send; put and wake may be called from any thread."""

    def __init__(self, name: str, *, admin: bool, most: int) -> None:
        self._name, self._admin, self._most = name, admin, most
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._waiting: deque[Message] = deque()
        self._behind = False

    def sees(self, message: Message) -> bool:
        return message.seen_by(self._name, admin=self._admin)

    def put(self, message: Message) -> None:
        if self._behind or not self.sees(message):
            return
        self._waiting.append(message)
        if len(self._waiting) > self._most:
            self._waiting.clear()
            self._behind = True
        self.wake()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the server has just closed its loop: nobody reads any more
            self._loop.call_soon_threadsafe(self._woken.set)

    async def wait(self, seconds: float) -> bool:
        """True once there is something to do, False when the time is up."""
        try:
            await asyncio.wait_for(self._woken.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def take(self) -> tuple[list[Message], bool]:
        """All that waits, and whether the page has fallen behind for good."""
        self._woken.clear()
        messages = list(self._waiting)
        self._waiting.clear()
        return messages, self._behind
