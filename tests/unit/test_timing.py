"""The stage table: the standard names, medians per step, and what was not measured."""

from __future__ import annotations

from app.timing import NOT_MEASURED, columns, stage_rows
from runtime.clock import DENOISE, STAGES, UPSAMPLE
from runtime.messages import StageTime
from runtime.meter import ATTENTION, PARTS


def step(stage: str, number: int, seconds: float, rank: int = 0) -> StageTime:
    return StageTime(stage=stage, seconds=seconds, step=number, rank=rank)


def test_a_step_s_number_is_the_median_of_what_the_slowest_rank_took() -> None:
    times = [
        step(DENOISE, 0, 9.0),  # warms up
        step(DENOISE, 1, 2.0),
        step(DENOISE, 1, 3.0, rank=1),
        step(DENOISE, 2, 2.5),
        step(ATTENTION, 0, 1.0),
        step(ATTENTION, 1, 1.5),
        step(ATTENTION, 2, 1.25),
    ]
    found = dict(columns(times, load_seconds=None))
    assert found["per step"] == 3.0 and found["per step: attention"] == 1.25
    assert found["denoise"] == 13.5 and found["load"] is None


def test_parts_that_were_not_measured_say_so_and_silence_is_zero() -> None:
    rows = dict(stage_rows([step(DENOISE, 0, 1.0)], load_seconds=2.0, peak_memory_bytes=0))
    assert all(rows[f"per step: {part}"] == NOT_MEASURED for part in PARTS)
    rows = dict(
        stage_rows([step("communication", 0, 0.0)], load_seconds=2.0, peak_memory_bytes=1 << 30)
    )
    assert rows["per step: communication"] == "0.00 ms"
    assert rows["peak memory"] == "1.00 GiB" and rows["load"] == "2.000 s"


def test_every_stage_of_the_clock_has_a_row() -> None:
    upsampled = StageTime(stage=UPSAMPLE, seconds=1.0)  # has one where it was
    names = {name for name, _ in columns([upsampled], load_seconds=None)}
    assert names - {UPSAMPLE} == {name for name, _ in columns([], load_seconds=None)}
    shown = {"E2E" if stage == "end to end" else stage for stage in STAGES}
    assert shown <= names and {f"per step: {part}" for part in PARTS} <= names
