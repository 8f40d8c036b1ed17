"""Byte counters of the buses become rates, over the real time between two readings of each."""

from __future__ import annotations

from collections.abc import Mapping


class Counters:
    """The counters of one GPU, which belong to a bus ("pcie", "nvlink").

    Some hosts count nothing and say 0 (DCGM issue 149). So 0 is "not reported" while no counter of
    the bus moved, of this GPU or one of the same model; `counting`, shared by all, holds the
    (bus, model) that did. Next to them 0 is a true zero.
    """

    def __init__(self, model: str, counting: set[tuple[str, str]]) -> None:
        self._model = model
        self._counting = counting
        self._values: dict[str, tuple[float, int]] = {}  # when (monotonic seconds), bytes

    def rates(
        self, bus: str, counts: Mapping[str, int | None], now: float
    ) -> dict[str, int | None]:
        """Bytes/s since the last reading; None at the first, after a reset, where not reported."""
        if any(counts.values()):
            self._counting.add((bus, self._model))
        return {key: self._rate(bus, key, count, now) for key, count in counts.items()}

    def bytes(self, bus: str, key: str) -> int | None:
        """As last read; None where not reported."""
        found = self._values.get(key)
        return found[1] if found is not None and self._reported(bus) else None

    def clear(self) -> None:
        """The GPU is lost: what it counted is void."""
        self._values.clear()

    def _reported(self, bus: str) -> bool:
        return (bus, self._model) in self._counting

    def _rate(self, bus: str, key: str, count: int | None, now: float) -> int | None:
        if count is None:
            self._values.pop(key, None)
            return None
        before = self._values.get(key)
        self._values[key] = (now, count)
        if before is None or count < before[1] or now <= before[0] or not self._reported(bus):
            return None
        return round((count - before[1]) / (now - before[0]))
