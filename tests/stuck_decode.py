"""The family h3 with a rank that stops, or is slow, in an exchange of the video VAE's decode.

Registered through the engine's `families` argument. The way is in the plan's name: "stuck 3" stops
in its third tile, "slow 4" takes four seconds for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.h3 import pipeline
from runtime.messages import Plan
from runtime.team import Ranks, Team

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = {"h3": "tests.stuck_decode"}


def load(plan: Plan, *, progress: Callable[[str, int, int], None], team: Team) -> pipeline.Pipeline:
    """The family's entry."""
    if team.rank == 1:
        assert isinstance(team, Ranks)
        way, number = plan.name.split()
        _change(team, way, int(number))
    return pipeline.load(plan, progress=progress, team=team)


def _change(team: Ranks, way: str, number: int) -> None:
    """Of what the rank sends: only its tiles go through Team.send."""
    send, sent = team.send, []

    def changed(x: Tensor) -> None:
        sent.append(1)
        if way == "slow":
            time.sleep(number)
        if way == "stuck" and len(sent) == number:
            team.receive(0, x)  # which sends none: both wait
        send(x)

    team.send = changed  # type: ignore[method-assign]
