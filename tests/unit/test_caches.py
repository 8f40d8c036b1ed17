"""Step caches on toy evaluations: what their gates let pass, and that they keep copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from runtime.caches import CACHES, Evaluation, Limits, StepOutcome, Streams, limits_of, step_cache
from runtime.caches.base import COMPUTED, Turns
from runtime.caches.spectrum import DEGREE, forecast_weights

VIDEO, AUDIO, WIDTH = 6, 2, 4


class Toy:
    """Three in-place blocks over [8, 4] rows; each adds its own amount to the rows of a stream."""

    def __init__(self, rows: Streams, added: Sequence[tuple[float, float]]) -> None:
        self.rows, self.added, self.calls = rows, added, [0] * len(added)

    def blocks(self, x: Tensor, start: int, stop: int) -> Tensor:
        for index in range(start, stop):
            self.calls[index] += 1
            x[:VIDEO].add_(self.added[index][0])
            x[VIDEO:].add_(self.added[index][1])
        return x

    def evaluation(self) -> Evaluation:
        return Evaluation(
            rows=self.rows,
            num_blocks=len(self.added),
            begin=lambda: torch.cat(self.rows),
            blocks=self.blocks,
            targets=lambda x: (x[:VIDEO], x[VIDEO:]),
            end=lambda video, audio: (video * 2, audio * 2),
        )

    @property
    def ran_whole(self) -> bool:
        return self.calls[-1] == 1


def rows(video: float, audio: float) -> Streams:
    return torch.full((VIDEO, WIDTH), float(video)), torch.full((AUDIO, WIDTH), float(audio))


def run(
    name: str, toys: Sequence[Toy], *, threshold: float, may_skip: bool = True
) -> tuple[list[Streams], list[StepOutcome]]:
    state = step_cache(name).state(limits(threshold), len(toys))
    told = [state.step(toy.evaluation(), may_skip=may_skip) for toy in toys]
    return [out for out, _ in told], [outcome for _, outcome in told]


def limits(threshold: float, warmup: int = 1, max_run: int = 1000) -> Limits:
    return Limits(threshold=threshold, warmup=warmup, max_run=max_run)


def still(count: int) -> list[Toy]:
    """Evaluations whose blocks always add the same."""
    return [Toy(rows(1 + 0.1 * i, 2 + 0.1 * i), [(1, 1), (2, 2), (3, 3)]) for i in range(count)]


@pytest.mark.parametrize("name", CACHES)
def test_without_leave_to_skip_every_step_is_computed(name: str) -> None:
    toys = still(6)
    outs, outcomes = run(name, toys, threshold=1e9, may_skip=False)
    assert [o.kind for o in outcomes] == [COMPUTED] * 6
    for toy, (video, audio) in zip(toys, outs, strict=True):
        want = toy.evaluation().whole()
        assert torch.equal(video, want[0]) and torch.equal(audio, want[1])


@pytest.mark.parametrize("name", CACHES)
def test_a_skipped_step_leaves_the_last_block_out(name: str) -> None:
    toys = still(6)
    _, outcomes = run(name, toys, threshold=1e9)
    assert [toy.ran_whole for toy in toys] == [o.kind == COMPUTED for o in outcomes]
    assert not all(toy.ran_whole for toy in toys)


def test_the_first_block_decides_and_is_always_run() -> None:
    toys = still(3)
    outs, outcomes = run("h3_cache", toys, threshold=0.01)
    assert [o.kind for o in outcomes] == [COMPUTED, "reused", "reused"]
    assert toys[2].calls == [1, 0, 0]
    assert torch.allclose(outs[2][0], (toys[2].rows[0] + 6) * 2)  # the rest added 5 as before


@pytest.mark.parametrize(("stream", "added"), [(0, (1.5, 1.0)), (1, (1.0, 1.5))])
def test_one_stream_alone_prevents_a_skip_by_its_first_block(
    stream: int, added: tuple[float, float]
) -> None:
    toys = [still(1)[0], Toy(rows(1, 2), [added, (2, 2), (3, 3)])]
    _, outcomes = run("h3_cache", toys, threshold=0.4)
    assert outcomes[1].kind == COMPUTED
    assert outcomes[1].change is not None
    assert outcomes[1].change[stream] == pytest.approx(0.5)
    assert outcomes[1].change[1 - stream] == pytest.approx(0)
    assert run("h3_cache", toys, threshold=0.6)[1][1].kind == "reused"


@pytest.mark.parametrize("loud", [0, 1])
def test_one_stream_alone_prevents_a_skip_by_its_expected_change(loud: int) -> None:
    """The input of one stream moves ten times as far, and its output with it."""
    speed = [0.01, 0.01]
    speed[loud] = 0.1
    toys = [Toy(rows(1 + speed[0] * i, 1 + speed[1] * i), [(0, 0), (0, 0)]) for i in range(3)]
    _, outcomes = run("easy_cache", toys, threshold=0.05)
    assert outcomes[2].kind == COMPUTED
    assert outcomes[2].change is not None
    assert outcomes[2].change[loud] > 0.05 > outcomes[2].change[1 - loud]
    assert run("easy_cache", toys, threshold=0.2)[1][2].kind == "reused"


def test_easy_cache_adds_up_what_it_expects_until_a_step_is_computed() -> None:
    toys = [Toy(rows(1 + 0.1 * i, 1 + 0.1 * i), [(0, 0), (0, 0)]) for i in range(8)]
    _, outcomes = run("easy_cache", toys, threshold=0.3)
    kinds = [o.kind for o in outcomes]
    assert kinds == [COMPUTED, COMPUTED, "reused", "reused", "reused", COMPUTED, "reused", "reused"]
    seen = [o.change[0] for o in outcomes[2:6] if o.change]
    assert seen == pytest.approx([0.1 / 1.1, 0.2 / 1.1, 0.3 / 1.1, 0.4 / 1.1], rel=1e-5)


def test_easy_cache_moves_its_last_output_with_the_input() -> None:
    toys = [Toy(rows(1 + 0.1 * i, 1 + 0.1 * i), [(0, 0), (0, 0)]) for i in range(3)]
    outs, outcomes = run("easy_cache", toys, threshold=9)
    assert outcomes[2].kind == "reused"
    assert torch.allclose(outs[2][0], outs[1][0] + 0.1)


@pytest.mark.parametrize("loud", [0, 1])
def test_one_stream_alone_prevents_a_forecast(loud: int) -> None:
    jump = [0.0, 0.0]
    jump[loud] = 5.0
    toys = [*still(3), Toy(rows(1.3 + jump[0], 2.3 + jump[1]), [(1, 1), (2, 2), (3, 3)])]
    state = step_cache("spectrum").state(limits(0.1), 9)
    told = [state.step(toy.evaluation(), may_skip=False)[1] for toy in toys]
    assert told[2].change == pytest.approx((0, 0), abs=0.01)
    assert told[3].change is not None
    assert told[3].change[loud] > 0.1 > told[3].change[1 - loud]
    assert state.step(still(1)[0].evaluation(), may_skip=True)[1].kind == COMPUTED


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_a_forecast_is_exact_for_polynomials(degree: int) -> None:
    past, at = (-1.0, -0.8, -0.3, 0.05, 0.4), 0.7
    weights = forecast_weights(past, at, degree=degree, ridge=0)
    for power in range(degree + 1):
        assert sum(w * t**power for w, t in zip(weights, past, strict=True)) == pytest.approx(
            at**power, abs=1e-12
        )


def test_a_forecast_of_a_higher_power_is_not_exact() -> None:
    past, at = (-1.0, -0.8, -0.3, 0.05, 0.4), 0.7
    weights = forecast_weights(past, at, degree=2, ridge=0)
    assert abs(sum(w * t**3 for w, t in zip(weights, past, strict=True)) - at**3) > 0.01


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10])
def test_what_stands_still_is_forecast_exactly_with_any_ridge(ridge: float) -> None:
    weights = forecast_weights((-1, -0.9, -0.7, -0.5, -0.2), 0.3, degree=DEGREE, ridge=ridge)
    assert sum(weights) == pytest.approx(1, abs=1e-12)


def test_spectrum_forecasts_features_that_move_along_a_line() -> None:
    toys = still(7)  # the features grow by 0.1 a step
    outs, outcomes = run("spectrum", toys, threshold=0.05)
    assert outcomes[6].kind == "forecast"
    want = toys[6].evaluation().whole()
    assert torch.allclose(outs[6][0], want[0], rtol=0.01)


@pytest.mark.parametrize("name", CACHES)
def test_what_a_cache_keeps_does_not_change_with_the_rows_of_blocks_in_place(name: str) -> None:
    """All steps share one buffer that blocks write into; a kept view would follow it."""
    buffer = torch.zeros(VIDEO + AUDIO, WIDTH)
    state = step_cache(name).state(limits(1e9), 8)
    for shared in (True, False):
        outs = []
        state = step_cache(name).state(limits(1e9), 8)
        for toy in still(8):
            whole = toy.evaluation()

            def begin(toy: Toy = toy, shared: bool = shared) -> Tensor:
                return buffer.copy_(torch.cat(toy.rows)) if shared else torch.cat(toy.rows)

            evaluation = Evaluation(
                rows=whole.rows, num_blocks=3, begin=begin, blocks=whole.blocks,
                targets=whole.targets, end=whole.end,
            )  # fmt: skip
            outs.append(state.step(evaluation, may_skip=True)[0])
        if shared:
            with_buffer = outs
    for (video, audio), (want_video, want_audio) in zip(with_buffer, outs, strict=True):
        assert torch.equal(video, want_video) and torch.equal(audio, want_audio)


@pytest.mark.parametrize("name", CACHES)
def test_a_stream_of_nothing_but_zeros_is_never_skipped(name: str) -> None:
    toys = [Toy(rows(0.1 * i, 0), [(1, 0), (2, 0), (3, 0)]) for i in range(6)]
    _, outcomes = run(name, toys, threshold=1e9)
    assert {o.kind for o in outcomes} == {COMPUTED}


def test_first_and_last_and_warm_up_steps_are_computed_and_runs_end() -> None:
    turns, seen = Turns(limits(1, warmup=3, max_run=2), 10), []
    for _ in range(10):
        seen.append(turns.may_skip())
        turns.took("reused" if seen[-1] else COMPUTED)
    assert seen == [False] * 3 + [True, True, False, True, True, False, False]


def test_even_without_warm_up_the_first_step_is_computed() -> None:
    assert not Turns(limits(1, warmup=0), 5).may_skip()


@pytest.mark.parametrize("name", CACHES)
def test_zero_leaves_a_limit_to_the_method(name: str) -> None:
    own = step_cache(name).own
    assert limits_of(name, threshold=0, warmup=0, max_run=0) == own
    assert limits_of(name, threshold=0.5, warmup=7, max_run=3) == limits(0.5, 7, 3)


def test_spectrum_computes_11_of_20_steps_when_its_gate_lets_all_pass() -> None:
    turns, computed = Turns(step_cache("spectrum").own, 20), 0
    for _ in range(20):
        skip = turns.may_skip()
        computed += not skip
        turns.took("forecast" if skip else COMPUTED)
    assert computed == 11


def test_an_unknown_cache_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="easy_cache, h3_cache, spectrum, got 'teacache'"):
        step_cache("teacache")
