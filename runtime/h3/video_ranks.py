"""Batches of VAE tiles over the ranks of a team; rank 0 joins what they decode.

The batches are those of one rank alone, so each tile comes from the same call: the bits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from runtime.clock import StageClock
from runtime.team import Team

Decode = Callable[[int], Tensor]  # the number of a batch -> raw tiles [B,3,F,H,W]
Timed = Callable[[], AbstractContextManager[None]]


class Conductor:
    """Rank 0: it announces each round, in which every rank decodes one batch.

    Used as a context: at its end the other ranks are sent home, and the clock hears what each of
    them measured of the request. Not after a round that rank 0 could not end: they stand in a send
    that it never receives, so they hear nothing, and the engine ends them.
    """

    def __init__(self, team: Team, clock: StageClock) -> None:
        self._team, self._clock = team, clock
        self._in_round = False

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_round:
            return
        self._team.share(lambda: -1)
        for times in self._team.collect(()):
            self._clock.hear(times)

    def batches(
        self, sizes: list[int], decode: Decode, check: Callable[[], None]
    ) -> Iterator[Tensor]:
        """Raw tiles of every batch in order; sizes: tiles of each.

        check: may raise to stop, before a round: one that was announced is decoded and received.
        """
        ranks = self._team.ranks
        for first in range(0, len(sizes), ranks):
            check()
            self._announce(first)
            own = decode(first)
            others = [
                self._team.receive(rank, own.new_empty(size, *own.shape[1:]))
                for rank, size in enumerate(sizes[first + 1 : first + ranks], start=1)
            ]
            self._in_round = False
            yield own
            del own
            while others:
                yield others.pop(0)

    def _announce(self, first: int) -> None:
        self._in_round = True
        self._team.share(lambda: first)


def help_out(team: Team, count: int, decode: Decode, timed: Timed) -> None:
    """Another rank: it decodes its batch of each round until rank 0 ends it.

    timed: encloses each batch, as waiting for rank 0 is no decoding.
    """
    while (first := team.share(lambda: -1)) >= 0:
        if first + team.rank < count:
            with timed():
                team.send(decode(first + team.rank))


def tell_times(team: Team, clock: StageClock) -> None:
    """Another rank, once it was sent home: rank 0's Conductor hears its stages."""
    team.collect(clock.times())
