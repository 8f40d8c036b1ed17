"""AdaLN tables once per schedule: kept by the bits of a step's times, in as many bytes as allowed.

M distinct times of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn

Tables = list[tuple[Tensor, ...]]  # of one step: a tuple per block, the final layer's last
Lend = Callable[[nn.Module], AbstractContextManager[None]]  # a layer's weights, while it is entered

KEPT_BYTES = 2 << 30  # the full-size pruned model's 12 steps take 0.87 GiB


class Modulation(Protocol):
    """What builds tables: the denoiser."""

    def modulation(self, times: Sequence[Tensor]) -> list[Tables]:
        """The tables of several steps, each from its own [M] times."""

    def table_bytes(self, num_times: int) -> int:
        """Bytes of one step's tables."""


def resident(layer: nn.Module) -> AbstractContextManager[None]:
    """Lends a layer whose weights lie on the device anyway."""
    del layer
    return nullcontext()


class TableCache:
    """The tables of one schedule; a longer one is built in windows of `limit_bytes`.

    Each step's tables come from the same products as if that step were built alone: steps are never
    one batch, which could choose another GEMM kernel.
    """

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self._limit = limit_bytes
        self._schedule: dict[bytes, Tensor] = {}
        self._kept: dict[bytes, Tables] = {}

    def plan(self, times: Iterable[Tensor], model: Modulation) -> None:
        """The times [M] fp32 on the CPU of every evaluation to come, in order; builds the first."""
        self._schedule = {_key(t_M): t_M for t_M in times}
        for t_M in list(self._schedule.values())[:1]:
            self.at(t_M, model)

    def at(self, t_M: Tensor, model: Modulation) -> Tables:
        """The tables of these times; those of the schedule's next steps are built along."""
        key = _key(t_M)
        if key not in self._kept:
            window = self._window(key, t_M, model)
            self._kept = {}  # before the new ones: never two schedules at once
            built = model.modulation(list(window.values()))
            self._kept = dict(zip(window, built, strict=True))
        return self._kept[key]

    def forget(self) -> None:
        """Nothing is kept and nothing is known of steps to come."""
        self._schedule, self._kept = {}, {}

    def _window(self, key: bytes, t_M: Tensor, model: Modulation) -> dict[bytes, Tensor]:
        """This step, and the schedule's steps after it that fit beside it."""
        window, used = {key: t_M}, model.table_bytes(len(t_M))
        if key not in self._schedule:
            return window
        steps = list(self._schedule)
        for later in steps[steps.index(key) + 1 :]:
            used += model.table_bytes(len(self._schedule[later]))
            if used > self._limit:
                break
            window[later] = self._schedule[later]
        return window


def _key(t_M: Tensor) -> bytes:
    return t_M.numpy().tobytes()
