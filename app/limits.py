"""How often somebody may do something: so many times in a moving window."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_MOST_KEYS = 4096  # addresses or users that are remembered; the quietest go first


class Window:
    """At most `most` events per key in any `seconds`; may be used from any thread."""

    def __init__(
        self, most: int, seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self.seconds = most, seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[str, deque[float]] = {}

    def take(self, key: str) -> float:
        """Counts one event and returns 0.0; or counts none and returns the seconds to wait."""
        now = self._clock()
        with self._lock:
            times = self._times.pop(key, deque[float]())
            while times and times[0] <= now - self.seconds:
                times.popleft()
            self._times[key] = times  # the latest key stands last
            if len(times) >= self.most:
                return times[0] + self.seconds - now
            times.append(now)
            if len(self._times) > _MOST_KEYS:
                del self._times[next(iter(self._times))]
            return 0.0

    def give_back(self, key: str) -> None:
        """Uncounts the latest event of a key: it was none of those to be limited."""
        with self._lock:
            if self._times.get(key):
                self._times[key].pop()
