"""The gate: equal plans are zero apart, an injected error is found at its step and stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Protocol

import pytest
import torch
from torch import Tensor

import runtime.kernels.attention as attention
from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.denoise import layout_of
from runtime.kernels.attention import Attend, AttentionBackend, AttentionOptions, sdpa
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan, Ref2VARequest
from runtime.parity import gate_classes, gate_judge
from runtime.parity.gate_cases import OWN, Case, random_case
from runtime.parity.gate_judge import Verdict
from runtime.parity.gate_references import References
from runtime.parity.gate_report import document, exit_status, summary
from runtime.parity.gate_tables import jumps
from tests.denoiser_parts import FILES, demo_plan

SMALL = Ref2VARequest(id="gate", prompt="", width=64, height=64, frames=22, steps=3)
NUM_BLOCKS = 3
Spoil = Callable[[Tensor, int], Tensor]  # output [1,S,H*d], number of the call over all rows


class Register(Protocol):
    """Makes an attention backend of that name and class: SDPA, spoiled call by call."""

    def __call__(self, name: str, spoil: Spoil, gate: str = "exact") -> None: ...


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, 7, partial(open_checkpoint, FILES.dit, "dit"), OWN)


def judge(p: Plan, q: Plan, case: Case, block_step: int = -1) -> Verdict:
    return gate_judge.judge(p, q, case, References(), block_step)


def plan(**fields: object) -> Plan:
    return demo_plan(name="p", **fields)


def num_rows(case: Case) -> int:
    return layout_of(case.positive, case.target).num_rows


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, case: Case) -> Register:
    def add(name: str, spoil: Spoil, gate: str = "exact") -> None:
        rows = num_rows(case)

        def load(device: torch.device, options: AttentionOptions) -> Attend:
            calls, exact = [0], sdpa.load(device, options)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                out = exact(q, k, v)
                if q.shape[2] != rows:  # the text refiner
                    return out
                calls[0] += 1
                return spoil(out, calls[0] - 1)

            return attend

        module = ModuleType(name)
        module.__dict__["BACKEND"] = AttentionBackend(name=name, load=load, route=sdpa.route)
        monkeypatch.setitem(sys.modules, f"runtime.kernels.attention.{name}", module)
        monkeypatch.setattr(attention, "BACKENDS", (*attention.BACKENDS, name))
        known: Mapping[str, Mapping[str, str]] = {
            **gate_classes.backends(),
            name: {"gate": gate},
        }
        monkeypatch.setattr(gate_classes, "backends", lambda: known)

    return add


def test_a_plan_against_itself_is_zero_apart(case: Case) -> None:
    verdict = judge(plan(), plan(), case)
    assert verdict.status == "passed"
    assert len(verdict.steps) == 3
    for step in verdict.steps:
        for figures in (*step.velocity.values(), *step.denoised.values()):
            assert (figures.relative_l2, figures.max_abs, figures.cosine) == (0.0, 0.0, 1.0)
    assert verdict.free is not None
    assert all(figures.relative_l2 == 0 for figures in verdict.free.values())


def test_a_head_that_is_one_per_cent_too_large_fails_from_the_first_step(
    case: Case, register: Register
) -> None:
    def scaled(out: Tensor, call: int) -> Tensor:
        return torch.cat([out[..., :128] * 1.01, out[..., 128:]], dim=-1)

    register("one_head", scaled)
    verdict = judge(plan(attention="one_head"), plan(), case)
    assert verdict.status == "FAILED"
    assert [step.within for step in verdict.steps] == [False] * 3


def test_an_error_in_one_step_is_found_at_that_step_alone(case: Case, register: Register) -> None:
    register("second_step", lambda out, call: out * (1.05 if call // NUM_BLOCKS == 1 else 1))
    verdict = judge(plan(attention="second_step"), plan(), case)
    assert [step.within for step in verdict.steps] == [True, False, True]
    assert verdict.worst_step == 1


def test_an_error_of_the_audio_alone_is_found_in_the_audio_alone(
    case: Case, register: Register
) -> None:
    sound = layout_of(case.positive, case.target).segments[-2]
    assert sound.kind == "audio"

    def spoil(out: Tensor, call: int) -> Tensor:
        if call % NUM_BLOCKS == NUM_BLOCKS - 1:  # the last block: nobody else sees it
            out = out.clone()
            out[:, sound.start : sound.stop] *= 1.05
        return out

    register("audio_only", spoil)
    verdict = judge(plan(attention="audio_only"), plan(), case)
    assert verdict.status == "FAILED"
    assert verdict.worst("video") == 0.0
    assert verdict.limits is not None
    assert verdict.worst("audio") > verdict.limits.of["audio"]


def test_the_block_where_the_error_begins_is_named(case: Case, register: Register) -> None:
    register("second_block", lambda out, call: out * (1.05 if call % NUM_BLOCKS == 1 else 1))
    verdict = judge(plan(attention="second_block"), plan(), case, block_step=1)
    assert [block["video"] > 0 for block in verdict.blocks] == [False, True, True]
    assert jumps(verdict).startswith("video block 1, audio block 1")


def test_blocks_are_compared_only_when_asked_for(case: Case) -> None:
    assert judge(plan(), plan(), case).blocks == ()


def test_not_a_number_is_beyond_every_limit(
    case: Case, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = gate_judge._figures(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert figures.relative_l2 == float("inf")


def test_a_backend_that_cannot_run_here_is_unavailable_and_not_passed(case: Case) -> None:
    verdict = judge(plan(attention="sdpa_cudnn"), plan(), case)
    assert (verdict.status, verdict.steps) == ("unavailable", ())
    assert "it needs a CUDA device" in verdict.reason
    assert exit_status([verdict]) == 2


def test_a_reference_that_cannot_run_here_is_an_error(case: Case) -> None:
    with pytest.raises(Unavailable, match="it needs a CUDA device"):
        judge(plan(), plan(attention="sdpa_cudnn"), case)


def test_a_field_that_the_checkpoint_does_not_use_is_not_called_passed(case: Case) -> None:
    verdict = judge(plan(nvfp4="nvfp4_native"), plan(), case)
    assert verdict.status == "not exercised"


def test_a_backend_of_unquantised_layers_passes_by_no_checkpoint_without_them(case: Case) -> None:
    """quack cannot run here; an INT8 file, whose blocks have none, is computed all the same."""
    int8 = partial(random_checkpoint, "dit", size="tiny", format="pruned_int8")
    without = random_case(SMALL, 7, int8, OWN)
    p, q = plan(dense="quack", dtype="bf16"), plan(dtype="bf16")
    verdicts = [judge(p, q, without), judge(p, q, case)]
    assert [one.status for one in verdicts] == ["not exercised", "unavailable"]
    assert document(p, q, verdicts, "")["backends"] == ["quack"]
    verdicts = [judge(p, plan(), without), judge(p, plan(), case)]  # another dtype as well
    assert [one.status for one in verdicts] == ["passed", "unavailable"]
    assert document(p, plan(), verdicts, "")["backends"] == []


@pytest.mark.parametrize(
    ("statuses", "code", "told"),
    [
        (("not exercised", "not exercised"), 2, "not exercised"),
        (("not exercised", "unavailable"), 2, "unavailable"),
        (("not exercised", "unavailable", "passed"), 0, "passed"),
    ],
)
def test_without_a_passed_case_the_exit_status_is_not_0(
    statuses: tuple[str, ...], code: int, told: str
) -> None:
    found = summary([Verdict(case=s, label="", status=s) for s in statuses])
    assert (found["exit"], found["status"]) == (code, told)


@pytest.mark.parametrize(("scale", "status"), [(1.002, "passed"), (1.5, "FAILED")])
def test_a_lossy_backend_is_held_to_the_yardstick_of_the_same_run(
    case: Case, register: Register, scale: float, status: str
) -> None:
    q = plan(dtype="bf16")
    own = judge(replace(q, attention="sage2"), q, case)
    register("scaled", lambda out, call: out * scale, "int8_attention")
    verdict = judge(replace(q, attention="scaled"), q, case)
    assert verdict.limits is not None
    assert verdict.limits.why == "int8_attention: 1.5 x sage2 against sdpa, this run"
    for stream in ("video", "audio"):
        assert verdict.limits.of[stream] == pytest.approx(1.5 * own.worst(stream))
    assert verdict.status == status


def test_a_broken_yardstick_does_not_let_a_broken_backend_pass(
    case: Case, register: Register
) -> None:
    """Were the limit 1.5 x what a broken sage2 is off, everything would be within it."""
    register("sage2", lambda out, call: out * 1.5, "int8_attention")
    register("as_bad", lambda out, call: out * 1.5, "int8_attention")
    q = plan(dtype="bf16")
    verdict = judge(replace(q, attention="as_bad"), q, case)
    assert verdict.status == "FAILED"
    assert verdict.limits is not None and "no yardstick is sage2" in verdict.limits.why
    assert verdict.limits.of["video"] == pytest.approx(0.056)


def test_a_yardstick_with_the_references_own_bits_leaves_the_fixed_limit(
    case: Case, register: Register
) -> None:
    """As on CUDA in fp32, where sdpa and sdpa_cudnn are one kernel and sdpa_math is another."""
    register("sdpa_math", lambda out, call: out)
    register("other_sums", lambda out, call: out * (1 + 4e-6))
    verdict = judge(plan(attention="other_sums"), plan(), case)
    assert verdict.limits is not None
    assert verdict.limits.why == (
        "exact: no yardstick is sdpa_math against sdpa, this run: the same bits; exact: fixed 1e-05"
    )
    assert 2e-6 < verdict.worst("video") < verdict.limits.of["video"] == pytest.approx(1e-5)
    assert verdict.status == "passed"


def test_the_yardstick_is_not_held_to_itself(case: Case) -> None:
    q = plan(dtype="bf16")
    verdict = judge(replace(q, attention="sage2"), q, case)
    assert verdict.limits is not None
    assert verdict.limits.why == "int8_attention: fixed 0.056"


def test_a_document_tells_backend_class_and_worst_figures(case: Case, register: Register) -> None:
    register("tenth", lambda out, call: out * 1.1)
    p, q = plan(attention="tenth"), plan()
    verdict = judge(p, q, case)
    found = document(p, q, [verdict], "launch.py gate")
    assert (found["status"], found["backends"], found["device"]) == ("failed", ["tenth"], "cpu")
    assert found["classes"] == ["exact"]
    assert found["worst"]["audio"] == verdict.worst("audio")
    assert found["failed"] == [case.name]
    assert found["results"][0]["label"] == OWN
