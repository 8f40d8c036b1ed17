"""Steps told before a run are the steps that the runtime's own schedule gives."""

from __future__ import annotations

import pytest

from app.step_counts import steps_run
from runtime.h3.schedule import sigmas_for


@pytest.mark.parametrize("steps", [1, 2, 3, 12, 20, 138, 139, 140, 200, 333, 500, 783, 900, 999])
def test_beta_runs_as_many_steps_as_its_schedule_has(steps: int) -> None:
    assert steps_run("beta", steps) == len(sigmas_for("beta", steps, 12.0)) - 1


def test_nine_hundred_steps_of_beta_are_783_and_of_simple_are_nine_hundred() -> None:
    assert (steps_run("beta", 900), steps_run("simple", 900)) == (783, 900)
