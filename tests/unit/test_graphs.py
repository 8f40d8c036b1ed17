"""Graphs around the denoiser, with a recorder that replays by calling again into the same results.

As on a GPU, such a replay reads the graph's own buffers and what its closure froze, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime.graphs import Graphs, Recording, Tensors
from runtime.h3.conditioning import Conditioning, ReferenceBlock
from runtime.h3.denoise import Latents, draw_noise
from runtime.h3.graphed import eagerly, graphed, pool_bytes
from runtime.h3.model import H3Model
from runtime.h3.packing import TargetShape
from runtime.h3.pipeline import Pipeline
from runtime.parity.taps import module_taps
from tests.denoiser_parts import TARGET, conditioning, demo_plan, denoiser, normal, side


class Again:
    """A recorder without a GPU."""

    def __init__(self) -> None:
        self.pool_bytes = 0
        self.recorded = self.replayed = self.settled = 0

    def warm_up(self, call: Callable[[], Tensors]) -> Tensors:
        return call()

    def record(self, call: Callable[[], Tensors]) -> Recording:
        self.recorded += 1
        self.pool_bytes += 1000
        with torch.inference_mode(False):  # a real replay writes them in any mode
            results = tuple(torch.zeros_like(t) for t in call())

        def replay() -> None:
            self.replayed += 1
            for own, new in zip(results, call(), strict=True):
                own.copy_(new)

        return Recording(replay=replay, results=results)

    def settle(self) -> None:
        self.settled += 1


def nothing() -> list[Tensor]:
    return []


def double(own: object) -> Tensors:
    (x,) = own  # type: ignore[misc]
    return (x * 2,)


# ---- graphs of any callable


def test_a_key_is_captured_once_and_replayed_afterwards() -> None:
    recorder = Again()
    graphs = Graphs(recorder)
    for seed in range(3):
        x = normal(4) + seed
        assert torch.equal(graphs.run("key", double, [x], nothing)[0], x * 2)
    assert (recorder.recorded, recorder.replayed) == (1, 2)


def test_a_replay_writes_into_no_earlier_result() -> None:
    graphs = Graphs(Again())
    inputs = [normal(4), normal(4) + 1, normal(4) + 2]
    results = [graphs.run("key", double, [x], nothing)[0] for x in inputs]
    assert all(torch.equal(y, x * 2) for x, y in zip(inputs, results, strict=True))


def test_an_operand_is_copied_so_its_memory_may_be_used_again() -> None:
    graphs, x = Graphs(Again()), normal(4)
    graphs.run("key", double, [x], nothing)
    x.fill_(float("nan"))
    assert torch.equal(graphs.run("key", double, [normal(4)], nothing)[0], normal(4) * 2)


@pytest.mark.parametrize(
    "other",
    [normal(3, 5), normal(4, 3).t(), normal(3, 4).double()],
    ids=["shape", "strides", "dtype"],
)
def test_another_shape_stride_or_type_is_another_graph(other: Tensor) -> None:
    recorder = Again()
    graphs = Graphs(recorder)
    graphs.run("key", double, [normal(3, 4)], nothing)
    assert torch.equal(graphs.run("key", double, [other], nothing)[0], other * 2)
    assert recorder.recorded == 2 and len(graphs) == 2


def test_strides_of_an_operand_are_those_of_the_graph_s_buffer() -> None:
    seen: list[tuple[int, ...]] = []

    def call(own: object) -> Tensors:
        (x,) = own  # type: ignore[misc]
        seen.append(x.stride())
        return (x + 0,)

    Graphs(Again()).run("key", call, [normal(4, 3).t()], nothing)
    assert set(seen) == {(1, 3)}


def test_the_least_recently_used_graph_goes_once_nothing_runs() -> None:
    recorder = Again()
    graphs = Graphs(recorder, most=2)
    for key in ("a", "b", "a", "c"):
        graphs.run(key, double, [normal(4)], nothing)
    assert len(graphs) == 2 and recorder.settled == 1
    graphs.run("a", double, [normal(4)], nothing)
    assert recorder.recorded == 3, "a was used after b: it stayed"
    graphs.run("b", double, [normal(4)], nothing)
    assert recorder.recorded == 4


def test_buffers_made_in_inference_mode_serve_outside_it() -> None:
    graphs = Graphs(Again())
    with torch.inference_mode():
        graphs.run("key", double, [normal(4)], nothing)
    with torch.no_grad():
        assert torch.equal(
            graphs.run("key", double, [normal(4) + 1], nothing)[0], 2 * normal(4) + 2
        )


# ---- the denoiser

PICTURE = ReferenceBlock(kind="ref_img", latent=normal(1, 24, 1, 2, 2), audio_latent=None)


def pair(format: str = "pruned_bf16", **fields: object) -> tuple[H3Model, H3Model, Again]:
    """The same denoiser twice: plain, and as graphs."""
    recorder = Again()
    with_graphs = denoiser(format, **fields)
    graphed(with_graphs, Graphs(recorder))
    return denoiser(format, **fields), with_graphs, recorder


def velocity(
    model: H3Model, given: Conditioning, sigma: float, target: TargetShape = TARGET
) -> Latents:
    with torch.inference_mode():
        noise = draw_noise(target, 5)
        return side(model, given, target=target).velocity(noise, torch.tensor(sigma))


def same(a: Latents, b: Latents) -> bool:
    return torch.equal(a.video, b.video) and torch.equal(a.audio, b.audio)


@pytest.mark.parametrize("format", ["pruned_bf16", "full_bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replayed_steps_have_the_bits_of_the_plain_ones(format: str, dtype: str) -> None:
    plain, model, recorder = pair(format, dtype=dtype)
    given = conditioning(references=(PICTURE,))
    for sigma in (0.9, 0.6, 0.3):
        assert same(velocity(model, given, sigma), velocity(plain, given, sigma))
    assert (recorder.recorded, recorder.replayed) == (1, 2)


def test_a_second_request_with_other_conditioning_replays_the_first_s_graph() -> None:
    plain, model, recorder = pair()
    first = conditioning(references=(PICTURE,))
    moved = replace(PICTURE, latent=normal(1, 24, 1, 2, 2) + 1)
    context = replace(first.context, context=first.context.context + 1)
    second = Conditioning(context=context, references=(moved,), keyframes=())
    for given in (first, second):
        assert same(velocity(model, given, 0.5), velocity(plain, given, 0.5))
    assert (recorder.recorded, recorder.replayed) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        conditioning((1, 1, 1, 1, 1)),
        conditioning((1, 0, 1, 1)),
        conditioning(references=(PICTURE,)),
    ],
    ids=["length of the text", "tags of the text", "a reference"],
)
def test_other_rows_are_another_graph(other: Conditioning) -> None:
    plain, model, recorder = pair()
    velocity(model, conditioning(), 0.5)
    assert same(velocity(model, other, 0.5), velocity(plain, other, 0.5))
    assert recorder.recorded == 2


def test_another_target_is_another_graph() -> None:
    plain, model, recorder = pair()
    wide = replace(TARGET, latent_w=8)
    velocity(model, conditioning(), 0.5)
    got = velocity(model, conditioning(), 0.5, wide)
    assert same(got, velocity(plain, conditioning(), 0.5, wide)) and recorder.recorded == 2


def test_another_number_of_distinct_times_is_another_graph() -> None:
    """At sigma 5e-4 the video is cleaner than its references, which then share its time."""
    plain, model, recorder = pair()
    given = conditioning(references=(PICTURE,))
    velocity(model, given, 0.5)
    assert same(velocity(model, given, 5e-4), velocity(plain, given, 5e-4))
    assert recorder.recorded == 2


def test_what_the_elementwise_steps_keep_is_held_by_the_graph() -> None:
    _, model, _ = pair()
    kept = normal(3)
    for block in model.blocks:
        block.ops.kept = lambda: (kept,)  # type: ignore[union-attr]
    velocity(model, conditioning(), 0.5)
    graphs = model.__dict__["forward"].graphs
    (graph,) = graphs._graphs.values()
    assert all(t is kept for t in graph.held) and len(graph.held) == len(model.blocks)


def test_taps_see_a_step_that_is_no_replay() -> None:
    plain, model, recorder = pair()
    velocity(model, conditioning(), 0.5)
    with module_taps(model) as got:
        velocity(model, conditioning(), 0.5)
    with module_taps(plain) as want:
        velocity(plain, conditioning(), 0.5)
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    velocity(model, conditioning(), 0.5)
    assert (recorder.recorded, recorder.replayed) == (1, 1), "graphs again after the taps"


def test_the_pool_s_bytes_are_told_and_none_without_graphs() -> None:
    plain, model, _ = pair()
    assert pool_bytes(plain) == pool_bytes(model) == 0
    velocity(model, conditioning(), 0.5)
    assert pool_bytes(model) == 1000
    with eagerly(model):
        assert pool_bytes(model) == 0


class Clock:
    """Of a request whose tensors took 5 bytes at most."""

    def peak_bytes(self) -> int:
        return 5


def test_the_peak_of_a_request_on_a_gpu_counts_the_pool_too() -> None:
    """With stand-ins: graphs of a GPU have not been looked at so."""
    plain, model, _ = pair()
    velocity(model, conditioning(), 0.5)
    pipeline = object.__new__(Pipeline)
    pipeline.device = torch.device("cuda")
    for its, peak in ((plain, 5), (model, 1005)):
        pipeline.model = its
        assert pipeline.peak_bytes(Clock()) == peak  # type: ignore[arg-type]


# ---- the plan


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": "cpu", "kernel_times": False}, "graphs must be false on device cpu"),
        ({"device": "cuda"}, "kernel_times must be false with graphs"),
        (
            {"device": "cuda", "kernel_times": False, "cache": "easy_cache"},
            "cache must be off with graphs, got 'easy_cache'",
        ),
    ],
)
def test_a_plan_that_graphs_cannot_run_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        demo_plan(graphs=True, **fields)
