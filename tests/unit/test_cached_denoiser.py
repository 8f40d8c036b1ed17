"""Step caches around the tiny denoiser: the bits of no cache where nothing is skipped, and counts.

Also through the whole pipeline: what a run tells, and that a request leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.caches import CACHES
from runtime.clock import StageClock
from runtime.h3.cached import CachedModel, summary
from runtime.h3.denoise import Side, draw_noise, sample
from runtime.h3.model import H3Model
from runtime.h3.pipeline import Pipeline, load
from runtime.h3.schedule import sigmas_for
from runtime.messages import STEP_CACHES, CachedStep, Event, Note, Plan, Ref2VARequest, Result
from tests.denoiser_parts import TARGET, conditioning, demo_plan, denoiser, side

STEPS = 12
NOISE = draw_noise(TARGET, 11)
TINY, HUGE = 1e-30, 100.0


@pytest.fixture(scope="module")
def model() -> H3Model:
    return denoiser()


def plan(cache: str, threshold: float = 0.0, **fields: object) -> Plan:
    return demo_plan(cache=cache, cache_threshold=threshold, **fields)


def run(positive: Side, negative: Side | None = None) -> Tensor:
    end = sample(
        positive,
        negative,
        cfg=1.0 if negative is None else 2.5,
        sampler="res_multistep",
        sigmas=sigmas_for("simple", STEPS, 12.0),
        noise=NOISE,
        start=None,
        on_step=lambda step: None,
    )
    return end.packed()


def cached(model: H3Model, plan: Plan, tags: tuple[int, ...] = (1, 1, 1, 1)) -> Side:
    made = side(model, conditioning(tags))
    made.evaluate = CachedModel(model, plan, STEPS, "positive")
    return made


def steps(side: Side) -> list[CachedStep]:
    assert isinstance(side.evaluate, CachedModel)
    return side.evaluate.steps


def test_the_plan_offers_the_caches_that_there_are() -> None:
    assert ("off", *CACHES) == STEP_CACHES


@pytest.mark.parametrize("name", CACHES)
def test_a_tiny_threshold_never_skips_and_keeps_every_bit(name: str, model: H3Model) -> None:
    behind = cached(model, plan(name, TINY, cache_warmup=1, cache_max_run=9))
    assert torch.equal(run(behind), run(side(model)))
    assert {step.kind for step in steps(behind)} == {"computed"}
    assert len(steps(behind)) == STEPS


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize(("warmup", "max_run"), [(4, 1), (5, 3), (12, 9), (4, 1000)])
def test_a_huge_threshold_skips_what_warm_up_and_runs_allow(
    name: str, warmup: int, max_run: int, model: H3Model
) -> None:
    behind = cached(model, plan(name, HUGE, cache_warmup=warmup, cache_max_run=max_run))
    run(behind)
    computed = [step.step for step in steps(behind) if step.kind == "computed"]
    late = [s for s in range(warmup, STEPS - 1) if (s - warmup) % (max_run + 1) == max_run]
    assert computed == sorted({*range(min(warmup, STEPS)), *late, STEPS - 1})


@pytest.mark.parametrize("name", CACHES)
def test_a_skipped_step_is_near_a_computed_one_but_not_the_same(name: str, model: H3Model) -> None:
    want, got = run(side(model)), run(cached(model, plan(name, HUGE, cache_max_run=1)))
    error = float((got - want).norm() / want.norm())
    assert 0 < error < 0.2


@pytest.mark.parametrize("name", CACHES)
def test_each_computed_step_measures_video_and_audio_apart(name: str, model: H3Model) -> None:
    behind = cached(model, plan(name, TINY))
    run(behind)
    last = steps(behind)[-1]
    assert last.video is not None and last.audio is not None
    assert last.video > 0 and last.audio > 0 and last.video != last.audio


def test_one_stream_over_the_threshold_prevents_every_skip(model: H3Model) -> None:
    """A threshold between the two streams' measures: one allows a skip, the other does not."""
    told = cached(model, plan("h3_cache", TINY, cache_warmup=1))
    run(told)
    measured = [(s.video, s.audio) for s in steps(told) if s.video and s.audio][1:]
    between = [(v + a) / 2 for v, a in measured]
    step = max(range(len(between)), key=lambda i: abs(measured[i][0] - measured[i][1]))
    behind = cached(model, plan("h3_cache", between[step], cache_warmup=step + 2, cache_max_run=1))
    run(behind)
    low, high = sorted(measured[step])
    assert low < between[step] < high
    assert steps(behind)[step + 2].kind == "computed"
    open_wide = cached(model, plan("h3_cache", high * 1.01, cache_warmup=step + 2))
    run(open_wide)
    assert steps(open_wide)[step + 2].kind == "reused"


def test_each_side_of_guidance_has_its_own_state(model: H3Model) -> None:
    """Two sides with one text between them are answered as each alone would be."""
    settings = plan("h3_cache", HUGE)
    positive, negative = cached(model, settings), cached(model, settings, (1, 1))
    run(positive, negative)
    assert [s.kind for s in steps(positive)] == [s.kind for s in steps(negative)]
    assert steps(positive)[-1].video != steps(negative)[-1].video
    both = cached(model, settings)
    run(both, cached(model, settings))
    alone = cached(model, settings)
    run(alone)
    assert [s.video for s in steps(both)] == [s.video for s in steps(alone)]


@pytest.mark.parametrize("name", CACHES)
def test_the_full_form_and_bf16_go_through_a_cache_too(name: str) -> None:
    full = denoiser("full_bf16", dtype="bf16")
    behind = cached(full, plan(name, TINY, dtype="bf16"))
    assert torch.equal(run(behind), run(side(full)))
    assert bool(run(cached(full, plan(name, HUGE, dtype="bf16"))).isfinite().all())


def test_the_summary_counts_steps_and_tells_both_streams() -> None:
    told = [CachedStep(step=i, side="positive", kind="computed") for i in range(6)]
    told[4] = CachedStep(step=4, side="positive", kind="reused", video=0.03, audio=0.0712)
    assert summary("h3_cache", told) == (
        "step cache h3_cache, positive: 5 of 6 steps computed; reused: 5; "
        "expected change at most 0.030 of video, 0.071 of audio"
    )
    assert summary("spectrum", told[:4]) == "step cache spectrum, positive: 4 of 4 steps computed"


# ---- the pipeline


def generated(pipeline: Pipeline, out: Path, *, cfg: float = 1.0) -> tuple[Result, list[Event]]:
    request = Ref2VARequest(
        id="r",
        prompt="a calm sea",
        width=64,
        height=32,
        frames=5,
        steps=8,
        seed=5,
        cfg=cfg,
        scheduler="simple",
    )
    events: list[Event] = []
    out.mkdir()
    result = pipeline.generate(
        request,
        out=out,
        media=False,
        preview=False,
        emit=events.append,
        cancelled=lambda: False,
        clock=StageClock(),
    )
    return result, events


def test_a_run_tells_which_steps_were_computed(tmp_path: Path) -> None:
    behind = load(
        plan("h3_cache", HUGE, cache_warmup=3, text_encoder="resident"),
        progress=lambda part, done, total: None,
    )
    assert behind.resolved["step cache"] == (
        "h3_cache, lossy: threshold 100 for video and for audio, 3 steps of warm-up, "
        "at most 1 skipped in a row"
    )
    first, events = generated(behind, tmp_path / "first", cfg=2.0)
    told = [e.text for e in events if isinstance(e, Note) and e.text.startswith("step cache")]
    assert len(told) == 2
    assert "h3_cache, positive: 6 of 8 steps computed; reused: 4, 6; " in told[0]
    assert "h3_cache, negative: 6 of 8 steps computed; reused: 4, 6; " in told[1]
    assert [s.step for s in first.cached_steps if s.kind == "reused"] == [3, 5, 3, 5]
    assert {s.side for s in first.cached_steps} == {"positive", "negative"}
    # the next request begins anew: the same steps, the same measures
    again, _ = generated(behind, tmp_path / "again", cfg=2.0)
    assert again.cached_steps == first.cached_steps


def test_without_a_cache_a_run_tells_nothing_of_one(tmp_path: Path) -> None:
    off = load(demo_plan(text_encoder="resident"), progress=lambda part, done, total: None)
    assert "step cache" not in off.resolved
    result, events = generated(off, tmp_path / "out")
    assert result.cached_steps == ()
    assert not any("step cache" in e.text for e in events if isinstance(e, Note))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cache": "teacache"}, "cache must be one of off, easy_cache, h3_cache, spectrum, got"),
        ({"cache_threshold": -0.1}, "cache_threshold must be 0 .the cache's own. to 100, got -0.1"),
        ({"cache_threshold": float("nan")}, "cache_threshold must be 0"),
        ({"cache_warmup": -1}, "cache_warmup must be 0 .the cache's own. to 1000, got -1"),
        ({"cache_max_run": 1001}, "cache_max_run must be 0"),
    ],
)
def test_a_plan_with_an_impossible_cache_is_refused(given: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        demo_plan(**given)
