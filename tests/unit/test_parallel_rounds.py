"""Rounds of VAE batches: a cancel comes between two of them, as the others send what was asked for.

A rank that was told of a round stands in a send until rank 0 receives: to leave it there and wait
for it hung both for ten minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.clock import StageClock
from runtime.engine import Engine
from runtime.h3.video_ranks import Conductor
from runtime.messages import Failure, Progress, Ready, Ref2VARequest
from tests.denoiser_parts import demo_plan

SIZES = [1, 1, 1, 1, 1]  # on two ranks: rounds 0, 2, 4


class Others:
    """The team as rank 0 sees it; said: what it announced, received and collected."""

    rank, ranks = 0, 2

    def __init__(self) -> None:
        self.said: list[object] = []

    def share(self, make: Callable[[], Any]) -> Any:
        self.said.append(make())
        return self.said[-1]

    def receive(self, rank: int, like: Tensor) -> Tensor:
        self.said.append(f"from {rank}")
        return torch.full_like(like, -1)

    def collect(self, value: Any) -> list[Any]:
        self.said.append("times")
        return [value]

    def send(self, x: Tensor) -> None:
        raise AssertionError("rank 0 sends none")

    def close(self) -> None:
        raise AssertionError("not its end")


def decode(number: int) -> Tensor:
    return torch.full((1, 3, 1, 2, 2), float(number))


def never() -> None:
    """Nobody cancels."""


def test_every_round_is_received_and_all_are_sent_home() -> None:
    team = Others()
    with Conductor(team, StageClock()) as conductor:
        found = [float(x.flatten()[0]) for x in conductor.batches(SIZES, decode, never)]
    assert found == [0, -1, 2, -1, 4]
    assert team.said == [0, "from 1", 2, "from 1", 4, -1, "times"]


def test_a_cancel_announces_no_further_round() -> None:
    team = Others()
    checks = iter([False, True])

    def check() -> None:
        if next(checks):
            raise Cancelled

    with pytest.raises(Cancelled), Conductor(team, StageClock()) as conductor:
        list(conductor.batches(SIZES, decode, check))
    assert team.said == [0, "from 1", -1, "times"]


def test_a_round_that_rank_0_cannot_end_is_left_to_the_engine() -> None:
    """It would wait for the times of ranks that wait for it."""
    team = Others()

    def broken(number: int) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with (
        pytest.raises(torch.OutOfMemoryError),
        Conductor(team, StageClock()) as conductor,
    ):
        list(conductor.batches(SIZES, broken, never))
    assert team.said == [0]


@pytest.fixture
def two() -> Iterator[Engine]:
    with Engine(demo_plan(text_encoder="resident", threads=1, layout="U2")) as engine:
        assert isinstance(list(engine.start())[-1], Ready)
        yield engine


@pytest.mark.timeout(120)
def test_a_cancel_between_two_of_many_rounds_ends_both_ranks(two: Engine, tmp_path: Path) -> None:
    """Many rounds: asked in the first, seen before a later one."""
    asked = Ref2VARequest(id="r", prompt="a sea", width=64, height=288, frames=209, steps=1)
    done, total, pids = 0, 0, two.pids
    for event in two.generate(asked, out=tmp_path, media=False, preview=False):
        if isinstance(event, Progress) and event.stage == "video VAE decode":
            done, total = event.done, event.total
            if done == 1:
                two.cancel("r")
    assert isinstance(event, Failure) and event.cancelled
    assert 1 <= done < total and two.pids == pids
