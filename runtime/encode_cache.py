"""Results of encoders kept between requests, under a key that says what they were made of."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

Key = tuple[Any, ...]  # JSON-able parts
T = TypeVar("T")


class EncodeCache:
    """Results of encoders on the host, the least recently used dropped beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def recall(self, key: Key, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """The value stored under `key`, else compute it and keep it if it fits at all."""
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        if digest in self._entries:
            self._entries.move_to_end(digest)
            found: T = self._entries[digest][0]
            return found
        value = compute()
        nbytes = size(value)
        if nbytes <= self.max_bytes:
            self._entries[digest] = (value, nbytes)
            self.used_bytes += nbytes
        while self.used_bytes > self.max_bytes:
            self.used_bytes -= self._entries.popitem(last=False)[1][1]
        return value
