"""A side's denoiser behind a step cache: the model's pieces as the cache's callables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from runtime.caches import COMPUTED, Evaluation, Limits, StepOutcome, limits_of, step_cache
from runtime.caches.base import Turns
from runtime.h3.model import H3Model, PackedInputs, StepRows
from runtime.messages import CachedStep, Plan


def limits(plan: Plan) -> Limits:
    """The plan's, and the cache's own where it says 0."""
    return limits_of(
        plan.cache,
        threshold=plan.cache_threshold,
        warmup=plan.cache_warmup,
        max_run=plan.cache_max_run,
    )


def route(plan: Plan) -> str:
    """The cache of a plan that has one, with all its limits, for the run record."""
    found = limits(plan)
    return (
        f"{plan.cache}, lossy: threshold {found.threshold:g} for video and for audio, "
        f"{found.warmup} steps of warm-up, at most {found.max_run} skipped in a row"
    )


class CachedModel:
    """Called as the model is, once per step of one side of one request; some steps are guessed.

    plan: one with a step cache. side: positive or negative. steps: how each one so far was
    answered.
    """

    def __init__(self, model: H3Model, plan: Plan, num_steps: int, side: str) -> None:
        self._model, self._side = model, side
        self._state = step_cache(plan.cache).state(limits(plan), num_steps)
        self._turns = Turns(limits(plan), num_steps)
        self.steps: list[CachedStep] = []

    def __call__(
        self, video_rows: Tensor, audio_rows: Tensor, inputs: PackedInputs, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """As H3Model.forward."""
        evaluation = _pieces(self._model, video_rows, audio_rows, inputs, rows)
        (video, audio), outcome = self._state.step(evaluation, may_skip=self._turns.may_skip())
        self._turns.took(outcome.kind)
        self.steps.append(_told(len(self.steps), self._side, outcome))
        return -video, -audio


def _pieces(
    model: H3Model, video_rows: Tensor, audio_rows: Tensor, inputs: PackedInputs, rows: StepRows
) -> Evaluation:
    tables = model.tables.at(rows.times_M, model)
    (a0, a1, _), (v0, v1, _) = inputs.segments[-2:]  # target audio and video come last

    def blocks(x_SD: Tensor, start: int, stop: int) -> Tensor:
        return model.run_blocks(x_SD, tables, rows.spans, inputs.rope, start, stop)

    def end(video_SD: Tensor, audio_SD: Tensor) -> tuple[Tensor, Tensor]:
        # Noise-ward as a cache wants it: the minus is exact, and undone on its way out.
        video, audio = model.final_layer(video_SD, audio_SD, tables[-1], rows)
        return -video, -audio

    return Evaluation(
        rows=(video_rows, audio_rows),
        num_blocks=len(model.blocks),
        begin=partial(model.embed, video_rows, audio_rows, inputs),
        blocks=blocks,
        targets=lambda x_SD: (x_SD[v0:v1], x_SD[a0:a1]),
        end=end,
    )


def _told(step: int, side: str, outcome: StepOutcome) -> CachedStep:
    video, audio = outcome.change or (math.nan, math.nan)
    return CachedStep(
        step=step,
        side=side,
        kind=outcome.kind,
        video=video if math.isfinite(video) else None,
        audio=audio if math.isfinite(audio) else None,
    )


def summary(name: str, steps: Sequence[CachedStep]) -> str:
    """One sentence on one side's steps: how many were computed, which were not, its measures."""
    skipped = [step for step in steps if step.kind != COMPUTED]
    text = f"step cache {name}, {steps[0].side}: "
    text += f"{len(steps) - len(skipped)} of {len(steps)} steps computed"
    if not skipped:
        return text
    numbers = ", ".join(str(step.step + 1) for step in skipped)
    video = max(step.video or 0.0 for step in skipped)
    audio = max(step.audio or 0.0 for step in skipped)
    text += f"; {skipped[0].kind}: {numbers}"
    return f"{text}; expected change at most {video:.3f} of video, {audio:.3f} of audio"
