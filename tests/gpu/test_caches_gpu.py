"""Step caches on a GPU: the bits of no cache where nothing is skipped, and what a gate costs."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from torch import Tensor

from runtime.caches import CACHES, Evaluation, Limits, Streams, step_cache
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.cached import CachedModel
from runtime.h3.denoise import Shifts, Side, draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.h3.schedule import sigmas_for
from tests.denoiser_parts import TARGET, conditioning, demo_plan

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
STEPS = 10
TINY, HUGE = 1e-30, 100.0
# The reference shape's target rows and the model's width: 960x544, 124 frames
VIDEO_ROWS, AUDIO_ROWS, WIDTH = 18_870, 414, 5376


@pytest.fixture(scope="module")
def model() -> H3Model:
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    return load_denoiser(checkpoint, demo_plan(device="cuda", dtype="bf16"), GPU)[0]


def run(model: H3Model, cache: str = "off", threshold: float = 0.0) -> tuple[Tensor, list[str]]:
    side = Side(model, conditioning(), TARGET, seed=7, shifts=Shifts(), device=GPU)
    kinds: list[str] = []
    if cache != "off":
        plan = demo_plan(device="cuda", dtype="bf16", cache=cache, cache_threshold=threshold)
        behind = CachedModel(model, plan, STEPS, "positive")
        side.evaluate = behind
    end = sample(
        side,
        None,
        cfg=1.0,
        sampler="res_multistep",
        sigmas=sigmas_for("simple", STEPS, 12.0),
        noise=draw_noise(TARGET, 11),
        start=None,
        on_step=lambda step: None,
    )
    if cache != "off":
        kinds = [step.kind for step in behind.steps]
    return end.packed().cpu(), kinds


@pytest.mark.parametrize("cache", CACHES)
def test_a_tiny_threshold_keeps_every_bit_and_a_huge_one_skips(cache: str, model: H3Model) -> None:
    want, _ = run(model)
    same, kinds = run(model, cache, TINY)
    assert torch.equal(same, want)
    assert set(kinds) == {"computed"}
    guessed, kinds = run(model, cache, HUGE)
    assert bool(guessed.isfinite().all())
    assert set(kinds) != {"computed"}


@pytest.mark.parametrize("cache", CACHES)
def test_a_gate_costs_little_beside_a_step(cache: str) -> None:
    """Blocks that do nothing: all that is left is copies, differences, sums and one wait."""
    state = step_cache(cache).state(Limits(threshold=TINY, warmup=1, max_run=1), 40)
    targets = torch.randn(VIDEO_ROWS + AUDIO_ROWS, WIDTH, device=GPU, dtype=torch.bfloat16)
    rows = torch.randn(VIDEO_ROWS, 96, device=GPU), torch.randn(AUDIO_ROWS, 32, device=GPU)
    drift = itertools.count()

    def blocks(x: Tensor, start: int, stop: int) -> Tensor:
        return x.add_(0.01 * next(drift)) if start == 0 else x

    def split(x: Tensor) -> Streams:
        return x[:VIDEO_ROWS], x[VIDEO_ROWS:]

    evaluation = Evaluation(
        rows=rows,
        num_blocks=50,
        begin=targets.clone,
        blocks=blocks,
        targets=split,
        end=lambda video, audio: (video[:, :96].float(), audio[:, :32].float()),
    )
    seconds: list[float] = []
    for _ in range(12):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for tensor in rows:
            tensor.add_(0.001)
        state.step(evaluation, may_skip=False)
        marks[1].record()
        torch.cuda.synchronize()
        seconds.append(marks[0].elapsed_time(marks[1]) / 1000)
    cost = statistics.median(seconds[2:])
    print(f"\n{cache}: {1000 * cost:.2f} ms a computed step")
    assert cost < 0.04
