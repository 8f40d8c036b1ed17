"""The engine with several ranks of a fake family, in real processes that talk over gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runtime.engine import Engine
from runtime.messages import Failure, Progress, Ready, Result
from tests import fakes

SILENCE = 3.0


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    """Two started ranks for the tests that leave them running."""
    with Engine(fakes.plan(layout="U2"), families=fakes.FAMILIES) as engine:
        assert isinstance(list(engine.start())[-1], Ready)
        yield engine


@pytest.fixture
def own() -> Iterator[Engine]:
    """Two started ranks that the test may break."""
    plan = fakes.plan(layout="U2")
    with Engine(plan, families=fakes.FAMILIES, silence_seconds=SILENCE) as engine:
        list(engine.start())
        yield engine


def works_again(engine: Engine, out: Path) -> float:
    """Seconds until the next request has ended well."""
    began = time.monotonic()
    if not engine.alive:
        assert isinstance(list(engine.start())[-1], Ready)
    *_, last = engine.generate(fakes.request(id="next"), out=out, media=False)
    assert isinstance(last, Result) and last.request_id == "next"
    return time.monotonic() - began


def test_two_ranks_serve_requests_in_turn(two: Engine, tmp_path: Path) -> None:
    for id in ("a", "b"):
        events = list(two.generate(fakes.request(id=id), out=tmp_path, media=False))
        assert isinstance(events[-1], Result) and two.alive
        steps = [e.done for e in events if isinstance(e, Progress) and e.stage == "denoise"]
        assert steps == [1, 2, 3, 4]


def test_a_cancel_stops_both_ranks_and_neither_is_restarted(two: Engine, tmp_path: Path) -> None:
    pids = two.pids
    for event in two.generate(fakes.request("slow", steps=9), out=tmp_path, media=False):
        if isinstance(event, Progress) and event.stage == "denoise" and event.done == 2:
            two.cancel("r1")
    assert isinstance(event, Failure) and event.cancelled
    works_again(two, tmp_path)
    assert two.pids == pids


def test_what_fails_on_every_rank_is_told_once_and_restarts_none(
    two: Engine, tmp_path: Path
) -> None:
    pids = two.pids
    *_, last = two.generate(fakes.request("fail"), out=tmp_path, media=False)
    assert last.reason == "video velocity at step 2 has 3 non-finite values"
    works_again(two, tmp_path)
    assert two.pids == pids


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("memory", "rank 1: the GPU ran out of memory: CUDA out of memory"),
        ("alone", "rank 1: rank 1 saw what rank 0 did not"),
    ],
)
def test_a_failure_of_one_rank_ends_all_and_is_told_with_rank_and_stage(
    own: Engine, tmp_path: Path, order: str, reason: str
) -> None:
    pids = own.pids
    *_, last = own.generate(fakes.request(order), out=tmp_path, media=False)
    assert isinstance(last, Failure) and (last.rank, last.stage) == (1, "denoise, step 2")
    assert last.reason == f"{reason}; the engine must be started again"
    assert works_again(own, tmp_path) < 60
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_stage(own: Engine, tmp_path: Path, rank: int) -> None:
    pids = own.pids
    for event in own.generate(fakes.request("slow"), out=tmp_path, media=False):
        if isinstance(event, Progress) and event.stage == "denoise" and event.done == 1:
            os.kill(pids[rank], signal.SIGKILL)
    assert isinstance(event, Failure) and event.rank == rank
    assert event.reason.startswith(f"rank {rank} died (exit code -9")
    assert event.stage == "denoise"
    assert works_again(own, tmp_path) < 60
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_hangs_and_all_are_started_again(
    own: Engine, tmp_path: Path, rank: int
) -> None:
    pids, began = own.pids, 0.0
    for event in own.generate(fakes.request("slow"), out=tmp_path, media=False):
        if isinstance(event, Progress) and event.stage == "denoise" and event.done == 2:
            os.kill(pids[rank], signal.SIGSTOP)
            began = time.monotonic()
    assert isinstance(event, Failure) and event.rank == rank
    assert event.reason.startswith(f"rank {rank} hung (")
    assert SILENCE - 1 < time.monotonic() - began < SILENCE + 10
    assert works_again(own, tmp_path) < 60
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_that_cannot_load_say_why_and_leave_no_process() -> None:
    engine = Engine(fakes.plan("broken", layout="U2"), families=fakes.FAMILIES)
    *_, last = engine.start()
    assert isinstance(last, Failure) and last.stage == "load"
    assert last.reason.startswith("dit.safetensors is truncated")
    assert engine.pids == ()
