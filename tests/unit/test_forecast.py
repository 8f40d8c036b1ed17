"""What is left of a running job: by its own pace where its steps are alike, else by history."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.forecast import Forecast, forecast
from app.history import DENOISE, END_TO_END, History
from app.live import Live
from runtime.messages import LTXRequest, Ref2VARequest, Request
from tests.ltx_plans import plan_of

H3 = Ref2VARequest(id="a", prompt="x", width=64, height=64, frames=22, steps=11)
LTX = LTXRequest(id="a", prompt="x", width=64, height=64, frames=9)


def forecast_of(request: Request, folder: Path, *, known: bool) -> Forecast:
    """8 of 11 steps took a second each; a run like it took 40 s of which 20 were steps."""
    plan, history = plan_of(folder), History()
    now = time.time()  # behind what takes time itself
    if known:
        history.add(request, plan, {DENOISE: 20.0, END_TO_END: 40.0, "mux": 5.0})
    live = Live(id="a", stage=DENOISE, done=8, total=11, began=now - 10, stage_began=now - 8)
    live = replace(live, step_ended=now)
    job = SimpleNamespace(id="a", over=False, state="running", request=request, plan=plan)
    runner: Any = SimpleNamespace(live=lambda id: live)
    store: Any = None
    return forecast(job, store, history, runner)  # type: ignore[arg-type]


def test_equal_steps_tell_how_long_the_others_take(tmp_path: Path) -> None:
    alone = forecast_of(H3, tmp_path, known=False)
    assert alone.eta is None and alone.denoise == pytest.approx(3.0, abs=0.1)
    assert forecast_of(H3, tmp_path, known=True).eta == pytest.approx(3.0 + 5.0, abs=0.1)


def test_steps_of_two_stages_tell_nothing_of_one_another(tmp_path: Path) -> None:
    assert forecast_of(LTX, tmp_path, known=False) == Forecast(wait=0.0)
    assert forecast_of(LTX, tmp_path, known=True).eta == pytest.approx(40.0 - 10.0, abs=0.1)
