"""The parts of a step on the CPU: what is measured, where it lands, and that it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.demo import random_checkpoint
from runtime.clock import DENOISE, StageClock
from runtime.h3.denoise import Latents
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.messages import StageTime
from runtime.meter import (
    ALL_COMMUNICATION,
    ATTENTION,
    COMMUNICATION,
    GEMM,
    OTHER,
    PARTS,
    Call,
    StepMeter,
)
from tests.denoiser_parts import CPU, TARGET, demo_plan, normal, side

FORMATS = ("full_bf16", "full_fp8", "pruned_bf16", "pruned_nvfp4", "pruned_int8")


def sleeping(seconds: float) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        time.sleep(seconds)
        return x

    return call


def parts_of(times: tuple[StageTime, ...]) -> dict[str, float]:
    return {time.stage: time.seconds for time in times if time.stage in PARTS}


def test_the_parts_of_a_step_are_its_calls_and_add_up_to_it() -> None:
    meter, clock, x = StepMeter("cpu"), StageClock(), torch.zeros(1)
    attend, multiply = meter.wrap(ATTENTION, sleeping(0.03)), meter.wrap(GEMM, sleeping(0.01))
    with clock.stage(DENOISE, step=3, meter=meter):
        attend(x)
        multiply(x)
        multiply(x)
        time.sleep(0.02)
    step, *_ = clock.times()
    parts = parts_of(clock.times())
    assert list(parts) == list(PARTS)
    assert 0.03 <= parts[ATTENTION] < 0.06 and 0.02 <= parts[GEMM] < 0.05
    assert 0.02 <= parts[OTHER] < 0.05
    assert parts[COMMUNICATION] == 0.0, "one rank sends nothing"
    assert sum(parts.values()) == pytest.approx(step.seconds, abs=1e-9)
    assert {(time.step, time.start) for time in clock.times()} == {(3, step.start)}


def test_transfers_under_way_at_once_count_once_and_beside_the_parts() -> None:
    spans = ((0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (6.0, 7.0))
    transfers = [Call(ALL_COMMUNICATION, start, end) for start, end in spans]
    parts = StepMeter("cpu").read([Call(GEMM, 0.0, 9.0), *transfers], 10.0)
    assert parts[ALL_COMMUNICATION] == 5.0
    assert parts[GEMM] == 9.0 and parts[OTHER] == 1.0 and parts[COMMUNICATION] == 0.0


def test_a_transfer_ends_once_and_only_within_a_step() -> None:
    meter = StepMeter("cpu")
    meter.transfer()()
    meter.open()
    ended, lost = meter.transfer(), meter.transfer()
    ended()
    (call,) = meter.close()
    ended()
    lost()
    assert call.part == ALL_COMMUNICATION and meter.read([call], 1.0)[ALL_COMMUNICATION] < 0.5
    assert meter.close() == ()


def test_what_runs_outside_a_step_is_not_measured() -> None:
    meter, clock, x = StepMeter("cpu"), StageClock(), torch.zeros(1)
    attend = meter.wrap(ATTENTION, sleeping(0.02))
    attend(x)
    with clock.stage(DENOISE, step=0, meter=meter):
        pass
    attend(x)
    with clock.stage(DENOISE, step=1, meter=meter):
        attend(x)
    seconds = [time.seconds for time in clock.times() if time.stage == ATTENTION]
    assert seconds[0] == 0.0 and 0.02 <= seconds[1] < 0.04


def test_a_step_that_failed_leaves_nothing_to_the_next() -> None:
    meter, clock, x = StepMeter("cpu"), StageClock(), torch.zeros(1)
    attend = meter.wrap(ATTENTION, sleeping(0.02))
    with pytest.raises(ZeroDivisionError), clock.stage(DENOISE, step=0, meter=meter):
        attend(x)
        _ = 1 / 0
    with clock.stage(DENOISE, step=0, meter=meter):
        pass
    assert parts_of(clock.times())[ATTENTION] == 0.0


def test_a_step_without_a_meter_has_no_parts() -> None:
    clock = StageClock()
    with clock.stage(DENOISE, step=0):
        pass
    assert [time.stage for time in clock.times()] == [DENOISE]


def test_a_part_that_is_none_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="'gemm' is not one of attention, GEMM"):
        StepMeter("cpu").wrap("gemm", sleeping(0))


def test_a_wrapped_call_gets_its_operands_and_gives_its_result_untouched() -> None:
    seen: list[Tensor] = []

    def call(*operands: Tensor) -> Tensor:
        seen.extend(operands)
        return operands[0]

    meter = StepMeter("cpu")
    measured, x = meter.wrap(GEMM, call), torch.randn(4, 6).t()
    for opened in (False, True):
        if opened:
            meter.open()
        assert measured(x, x[1:]) is x
    assert seen[0] is x and seen[2] is x
    assert seen[3].data_ptr() == x[1:].data_ptr() and seen[3].stride() == x[1:].stride()


def metered(format: str) -> tuple[H3Model, H3Model, StepMeter]:
    """One checkpoint, loaded plainly and with a meter."""
    meter, plan = StepMeter("cpu"), demo_plan(dtype="bf16")
    checkpoint = random_checkpoint("dit", size="tiny", format=format)
    plain, _ = load_denoiser(checkpoint, plan, CPU)
    measured, _ = load_denoiser(checkpoint, plan, CPU, None, meter)
    return plain, measured, meter


def velocity(model: H3Model) -> Latents:
    shape = (1, 24, TARGET.latent_t, TARGET.latent_h, TARGET.latent_w)
    x = Latents(video=normal(*shape), audio=normal(1, 32, 2, TARGET.audio_t))
    rounded = Latents(video=x.video.to(model.dtype), audio=x.audio.to(model.dtype))
    with torch.inference_mode():
        return side(model).velocity(rounded, torch.tensor(0.7))


@pytest.mark.parametrize("format", FORMATS)
def test_a_measured_denoiser_gives_the_same_bits(format: str) -> None:
    plain, measured, meter = metered(format)
    expected = velocity(plain)
    meter.open()
    got = velocity(measured)
    assert meter.close()
    assert torch.equal(got.video, expected.video) and torch.equal(got.audio, expected.audio)


@pytest.mark.parametrize("format", FORMATS)
def test_every_attention_and_every_linear_is_measured(format: str) -> None:
    plain, measured, meter = metered(format)
    meter.open()
    velocity(measured)
    calls = meter.close()
    cfg = plain.cfg
    blocks = cfg.num_layers + cfg.num_refiner_layers
    assert sum(call.part == ATTENTION for call in calls) == blocks
    # qkv, out, fc1, fc2 of a block, AdaLN of the main ones; condition, two patches, three last
    linears = 4 * blocks + cfg.num_layers + 6 + (0 if cfg.pruned else 2)
    assert sum(call.part == GEMM for call in calls) == linears
