"""Which readings a tick makes: what is most overdue, as long as the share of a core is not spent.

Time is earned at the allowed share and everything the thread does is paid from it, so the average
stays under the share for any number of GPUs; what does not fit is read later, and nothing starves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf

Key = tuple[str, str]  # UUID of a GPU, group of its readings

_SAVED_SECONDS = 2.0  # of earning that may be kept for later
_NEARLY = 0.9  # of its period: a tick that comes a little early does not wait for the next
_SMOOTH = 0.2  # weight of the newest cost
WEIGHTS: Mapping[str, float] = {"state": 8.0, "load": 4.0}  # how much sooner than the buses


class Schedule:
    """Belongs to one thread. `meter`: CPU seconds that this thread has used so far."""

    def __init__(self, meter: Callable[[], float] = time.thread_time) -> None:
        self.costs: dict[str, float] = {}  # group: CPU seconds of one reading, smoothed
        self._meter = meter
        self._last: dict[Key, float] = {}
        self._balance = 0.0  # CPU seconds, when the tick began
        self._began: tuple[float, float] | None = None  # of this tick: now, meter

    def begin(self, now: float, share: float) -> None:
        """A tick begins: earns since the last one, and pays what the thread has used since.

        The first one is free: drivers answer late until everything was asked for once.
        """
        used = self._meter()
        if self._began is None:
            self._balance = inf
        else:
            then, metered = self._began
            balance = 0.0 if self._balance == inf else self._balance - (used - metered)
            self._balance = min(balance + share * (now - then), share * _SAVED_SECONDS)
        self._began = (now, used)

    def run(self, wanted: Mapping[Key, float], read: Callable[[Key], None]) -> None:
        """Reads what is due by its period (seconds), most overdue first, while there is time."""
        assert self._began is not None, "a tick has begun"
        now = self._began[0]
        late = {key: (now - self._last.get(key, -inf)) / wanted[key] for key in wanted}
        due = [key for key in wanted if late[key] >= _NEARLY]
        for key in sorted(due, key=lambda key: -late[key] * WEIGHTS.get(key[1], 1.0)):
            if self._left() <= 0:
                return
            before = self._meter()
            read(key)
            spent = self._meter() - before
            known = self.costs.get(key[1], spent)
            self.costs[key[1]] = known + _SMOOTH * (spent - known)
            self._last[key] = now

    def hasten(self, group: str) -> None:
        """Every GPU's reading of this group is overdue."""
        for key in self._last:
            if key[1] == group:
                self._last[key] = -inf

    def pause(self, share: float) -> float:
        """Seconds until what this tick spent too much is earned again."""
        return max(0.0, -self._left() / share) if self._began else 0.0

    def _left(self) -> float:
        assert self._began is not None, "a tick has begun"
        return self._balance - (self._meter() - self._began[1])
