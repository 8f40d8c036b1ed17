"""StageClock on the CPU: what is timed, what is taken out, and where a failure was."""

from __future__ import annotations

import time

import pytest
import torch

from runtime.clock import DENOISE, END_TO_END, MUX, VIDEO_VAE_DECODE, StageClock


def test_nested_stages_end_inside_out_and_keep_their_step() -> None:
    clock = StageClock()
    with clock.stage(END_TO_END), clock.stage(DENOISE, step=2):
        time.sleep(0.02)
    assert [(s.stage, s.step) for s in clock.times()] == [(DENOISE, 2), (END_TO_END, -1)]
    inner, outer = (s.seconds for s in clock.times())
    assert 0.02 <= inner <= outer


def test_a_start_counts_from_the_request_s_begin_on_one_axis() -> None:
    clock = StageClock()
    time.sleep(0.01)
    with clock.stage(END_TO_END):
        time.sleep(0.02)
        with clock.stage(DENOISE, step=0):
            time.sleep(0.01)
        with clock.stage(MUX):
            pass
    step, mux, whole = clock.times()
    assert 0.01 <= whole.start < 0.02
    assert whole.start + 0.02 <= step.start < whole.start + 0.04
    assert step.start + step.seconds <= mux.start <= whole.start + whole.seconds


def test_what_other_ranks_measured_is_told_with_their_numbers() -> None:
    first, second = StageClock(), StageClock(rank=1)
    for clock in (first, second):
        with clock.stage(DENOISE, step=0):
            pass
    first.hear(second.times())
    assert [(s.stage, s.rank) for s in first.drain()] == [(DENOISE, 1), (DENOISE, 0)]
    assert first.drain() == [] and len(first.times()) == 2


def test_on_the_cpu_no_device_memory_is_measured() -> None:
    clock = StageClock()
    with clock.stage(MUX):
        pass
    assert clock.times()[0].peak_bytes == 0 and clock.peak_bytes() == 0


def test_a_peak_is_that_of_its_stage_and_the_outer_one_s_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = FakeMemory()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory.most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", memory.reset)
    monkeypatch.setattr("runtime.clock.mark", lambda device: time.perf_counter())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory.use(900)  # of the request before
    memory.use(100)
    clock = StageClock("cuda")
    with clock.stage(END_TO_END):
        memory.use(300)
        with clock.stage(DENOISE, step=0):
            memory.use(700)
            memory.use(200)
        with clock.stage(MUX):
            memory.use(400)
            memory.use(100)
        memory.use(500)
    peaks = {time.stage: time.peak_bytes for time in clock.times()}
    assert peaks == {DENOISE: 700, MUX: 400, END_TO_END: 700}
    assert clock.peak_bytes() == 700


class FakeMemory:
    """The two counters of torch's allocator."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def use(self, bytes: int) -> None:
        self.now = bytes
        self.most = max(self.most, bytes)

    def reset(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.most = self.now


def test_an_exclusive_stage_leaves_out_what_it_contains() -> None:
    clock = StageClock()
    with clock.stage(MUX, exclusive=True):
        with clock.stage(VIDEO_VAE_DECODE):
            time.sleep(0.05)
        time.sleep(0.01)
    decode, mux = (s.seconds for s in clock.times())
    assert decode >= 0.05 and 0.01 <= mux < 0.04


def test_drain_tells_every_stage_once() -> None:
    clock = StageClock()
    with clock.stage(MUX):
        pass
    assert [s.stage for s in clock.drain()] == [MUX]
    assert clock.drain() == []


@pytest.mark.parametrize("after", [False, True])
def test_a_failure_is_named_by_its_innermost_stage_or_by_the_one_before(after: bool) -> None:
    clock = StageClock()
    with pytest.raises(ZeroDivisionError), clock.stage(END_TO_END):
        with clock.stage(DENOISE, step=2):
            _ = 1 / (1 if after else 0)
        _ = 1 / 0
    assert clock.failed == "denoise, step 3"


def test_a_failure_of_an_outer_stage_is_not_blamed_on_the_inner_one_that_went_well() -> None:
    clock = StageClock()
    with pytest.raises(ZeroDivisionError), clock.stage(END_TO_END), clock.stage(MUX):
        with clock.stage(VIDEO_VAE_DECODE):
            pass
        _ = 1 / 0
    assert clock.failed == MUX


def test_a_failure_before_any_stage_is_named_too() -> None:
    clock = StageClock()
    with pytest.raises(ZeroDivisionError), clock.stage(END_TO_END):
        _ = 1 / 0
    assert clock.failed == END_TO_END


def test_an_unknown_stage_is_our_own_mistake() -> None:
    with (
        pytest.raises(AssertionError, match="'warmup' is not one of load"),
        StageClock().stage("warmup"),
    ):
        pass
