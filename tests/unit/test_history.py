"""What our own runs tell of the next one; without one of the same class nothing is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.history import History, Moment, Typical, denoise_left, remaining, times_of
from app.live import Live
from runtime.messages import Progress, Reference, StageTime
from tests import fakes

PLAN = fakes.plan()
TIMES = {"load": 8.0, "denoise": 60.0, "video VAE decode": 6.0, "mux": 4.0, "end to end": 75.0}
TYPICAL = Typical(before=5.0, denoise=60.0, after=10.0, load=8.0)


def moment(stage: str, done: int = 0, total: int = 12, **seconds: float) -> Moment:
    zero = {"run_seconds": 0.0, "stage_seconds": 0.0, "step_seconds": 0.0}
    return Moment(stage=stage, done=done, total=total, **(zero | seconds))


def history(*runs: dict[str, float]) -> History:
    found = History()
    for times in runs:
        found.add(fakes.request(), PLAN, times)
    return found


def test_without_a_run_of_the_class_nothing_is_told() -> None:
    assert history().typical(fakes.request(), PLAN) is None


def test_a_run_tells_what_came_before_during_and_after_the_steps() -> None:
    assert history(TIMES).typical(fakes.request("another", seed=7), PLAN) == TYPICAL


def test_the_median_of_the_newest_twenty_counts() -> None:
    slow = TIMES | {"denoise": 600.0, "end to end": 615.0}
    typical = history(*[slow] * 30, *[TIMES] * 20).typical(fakes.request(), PLAN)
    assert typical == TYPICAL
    assert (history(TIMES, slow, TIMES).typical(fakes.request(), PLAN) or slow) == TYPICAL


@pytest.mark.parametrize(
    "change",
    [
        {"width": 96},
        {"height": 96},
        {"frames": 39},
        {"steps": 5},
        {"sampler": "euler"},
        {"cfg": 3.0},
        {"references": (Reference(kind="image", path=Path("a.png")),)},
        {"ref_image_size": "max"},
    ],
)
def test_another_shape_is_another_class(change: dict[str, Any]) -> None:
    assert history(TIMES).typical(replace(fakes.request(), **change), PLAN) is None


def test_another_plan_is_another_class() -> None:
    assert history(TIMES).typical(fakes.request(), replace(PLAN, attention="sage2")) is None


def test_kinds_and_counts_of_references_make_the_class_not_their_files() -> None:
    def with_files(*names: str) -> Any:
        references = tuple(Reference(kind="image", path=Path(name)) for name in names)
        return fakes.request(references=references)

    found = History()
    found.add(with_files("a", "b"), PLAN, TIMES)
    assert found.typical(with_files("c", "d"), PLAN) == TYPICAL
    assert found.typical(with_files("a"), PLAN) is None


def test_a_run_without_a_whole_clock_tells_nothing() -> None:
    assert history({"denoise": 3.0}).typical(fakes.request(), PLAN) is None


def test_times_are_summed_over_steps_of_the_first_rank_and_leave_out_their_parts() -> None:
    stages = [
        StageTime(stage="denoise", seconds=2.0, step=0),
        StageTime(stage="denoise", seconds=3.0, step=1),
        StageTime(stage="denoise", seconds=9.0, step=0, rank=1),
        StageTime(stage="attention", seconds=1.0, step=0),
        StageTime(stage="end to end", seconds=6.0),
    ]
    assert times_of(stages, 4.0) == {"load": 4.0, "denoise": 5.0, "end to end": 6.0}


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (moment("start"), 75.0),
        (moment("text encode", run_seconds=2.0), 73.0),
        (moment("text encode", run_seconds=99.0), 70.0),  # late: what comes is not shorter
        (moment("denoise", stage_seconds=2.0, step_seconds=2.0), 68.0),
        (moment("denoise", 4, stage_seconds=40.0), 90.0),  # 10 s a step, not the usual 5
        (moment("denoise", 4, stage_seconds=43.0, step_seconds=3.0), 87.0),
        (moment("denoise", 4, stage_seconds=90.0, step_seconds=50.0), 80.0),  # a step hangs
        (moment("denoise", 12, stage_seconds=60.0), 10.0),
        (moment("video VAE decode", stage_seconds=4.0), 6.0),
        (moment("mux", stage_seconds=99.0), 0.0),
    ],
)
def test_what_is_left_follows_the_own_rate_for_steps_and_history_for_the_rest(
    now: Moment, left: float
) -> None:
    assert remaining(TYPICAL, now) == pytest.approx(left)


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (moment("text encode", run_seconds=9.0), None),
        (moment("denoise", 1, stage_seconds=12.0), None),
        (moment("denoise", 2, stage_seconds=10.0), 50.0),  # 5 s a step, 10 steps
        (moment("denoise", 2, stage_seconds=13.0, step_seconds=3.0), 47.0),
        (moment("denoise", 12, stage_seconds=60.0), 0.0),
        (moment("video VAE decode", stage_seconds=4.0), None),
    ],
)
def test_a_first_run_tells_what_its_steps_need_by_its_own_pace_and_no_more(
    now: Moment, left: float | None
) -> None:
    assert denoise_left(now) == (left if left is None else pytest.approx(left))


def test_stages_after_the_steps_count_from_the_first_of_them() -> None:
    live = Live(id="a", stage="denoise", began=1.0, stage_began=2.0)
    for now, stage in ((10.0, "video VAE decode"), (14.0, "audio VAE decode"), (17.0, "mux")):
        live = live.after(Progress(request_id="a", stage=stage, done=0, total=1), now)
    assert (live.stage, live.moment(18.0).stage_seconds) == ("mux", 8.0)


def test_a_step_ends_when_its_count_moves() -> None:
    live = Live(id="a", began=1.0)
    for now, done in ((10.0, 0), (15.0, 1), (16.0, 1), (21.0, 2)):
        live = live.after(Progress(request_id="a", stage="denoise", done=done, total=9), now)
    moment = live.moment(23.0)
    assert (moment.run_seconds, moment.stage_seconds, moment.step_seconds) == (22.0, 13.0, 2.0)
