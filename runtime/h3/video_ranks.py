"""Batches of VAE tiles over the ranks of a team; rank 0 joins what they decode.

The batches are those of one rank alone, so each tile comes from the same call: the bits stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from runtime.team import Team

Decode = Callable[[int], Tensor]  # the number of a batch -> raw tiles [B,3,F,H,W]


class Conductor:
    """Rank 0: it announces each round, in which every rank decodes one batch.

    Used as a context: at its end, whatever ended it, the other ranks are sent home.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        self._team.share(lambda: -1)

    def batches(self, sizes: list[int], decode: Decode) -> Iterator[Tensor]:
        """Raw tiles of every batch in order; sizes: tiles of each."""
        ranks = self._team.ranks
        for first in range(0, len(sizes), ranks):
            self._announce(first)
            own = decode(first)
            others = [
                self._team.receive(rank, own.new_empty(size, *own.shape[1:]))
                for rank, size in enumerate(sizes[first + 1 : first + ranks], start=1)
            ]
            yield own
            del own
            while others:
                yield others.pop(0)

    def _announce(self, first: int) -> None:
        self._team.share(lambda: first)


def help_out(team: Team, count: int, decode: Decode) -> None:
    """Another rank: it decodes its batch of each round until rank 0 ends it."""
    while (first := team.share(lambda: -1)) >= 0:
        if first + team.rank < count:
            team.send(decode(first + team.rank))
