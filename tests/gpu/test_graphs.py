"""CUDA graphs of the denoiser on a GPU: the bits of the plain evaluation, and memory that stays.

Also that an evaluation never waits for the GPU, with or without graphs, and a step once.
"""

from __future__ import annotations

import gc
import itertools
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoints.demo import random_checkpoint
from runtime.graphs import CudaRecorder, Graphs
from runtime.h3.conditioning import Conditioning, ReferenceBlock
from runtime.h3.config import H3Config
from runtime.h3.denoise import Latents, Shifts, Side, draw_noise, sample
from runtime.h3.graphed import GraphedForward, graphed, pool_bytes
from runtime.h3.load import load_denoiser
from runtime.h3.model import FP32_ISLANDS, H3Model
from runtime.h3.packing import TargetShape
from runtime.h3.schedule import sigmas_for
from runtime.kernels.attention import AttentionOptions, load_attention
from runtime.kernels.elementwise import load as load_elementwise
from tests.denoiser_parts import TARGET, conditioning, demo_plan, normal

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda")
PICTURE = ReferenceBlock(kind="ref_img", latent=normal(1, 24, 1, 2, 2), audio_latent=None)
WIDE = replace(TARGET, latent_w=10)
TAGS = (1,) * 70
MEDIUM = TargetShape(latent_t=8, latent_h=32, latent_w=32, audio_t=40)
CONFIG = H3Config(
    hidden=1024, num_layers=4, num_refiner_layers=1, num_heads=8, head_dim=128, ffn=4096,
    text_dim=16, video_channels=24, audio_channels=32, num_inv_freq=16, time_dim=8,
    curve_grid=129, time_hidden=0, frequency_dim=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    gc.collect()  # a graphed model and its wrapper refer to each other
    torch.cuda.empty_cache()


def tiny(graphs: bool, format: str = "pruned_bf16", **fields: object) -> H3Model:
    checkpoint = random_checkpoint("dit", size="tiny", format=format)
    base = {"device": "cuda", "dtype": "bf16", "kernel_times": False, "graphs": graphs}
    plan = demo_plan(**(base | fields))
    return load_denoiser(checkpoint, plan, GPU)[0]


def medium(elementwise: str = "triton") -> H3Model:
    """Random weights, large enough for the GPU's real kernels."""
    attend = load_attention("sdpa_cudnn", GPU, torch.bfloat16, AttentionOptions())
    with GPU:
        torch.manual_seed(1)
        model = H3Model(CONFIG, attend, load_elementwise(elementwise, GPU))
        for tensor in (*model.parameters(), *model.buffers()):
            torch.nn.init.normal_(tensor.data, std=0.02)
    for name, parameter in model.named_parameters():
        if not name.startswith(FP32_ISLANDS) and "adaln_proj" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def side(model: H3Model, given: Conditioning, target: TargetShape) -> Side:
    return Side(model, given, target, seed=7, shifts=Shifts(), device=GPU)


def velocity(
    model: H3Model, given: Conditioning, sigma: float, target: TargetShape = TARGET
) -> Tensor:
    """Of a new request each time: its memory is given back, and overwritten by the next."""
    with torch.inference_mode():
        noise = draw_noise(target, 5)
        x = Latents(video=noise.video.to(GPU), audio=noise.audio.to(GPU))  # fp32 velocities
        found = side(model, given, target).velocity(x, torch.tensor(sigma)).packed()
    assert torch.isfinite(found).all()
    return found


def spoil() -> None:
    """Fills what has been given back with NaN: a graph that reads it cannot go unseen."""
    torch.cuda.synchronize()
    held = [torch.full((n,), float("nan"), device=GPU) for n in (1 << 8, 1 << 12, 1 << 17) * 40]
    del held


FORMATS = ("pruned_bf16", "full_bf16", "pruned_int8", "pruned_nvfp4", "full_fp8")


@pytest.mark.parametrize("elementwise", ["eager", "triton"])
@pytest.mark.parametrize("format", FORMATS)
def test_replays_have_the_bits_of_the_plain_evaluation(format: str, elementwise: str) -> None:
    plain = tiny(False, format, elementwise=elementwise)
    model = tiny(True, format, elementwise=elementwise)
    given = conditioning(references=(PICTURE,))
    for sigma in (0.9, 0.6, 0.3):
        assert torch.equal(velocity(model, given, sigma), velocity(plain, given, sigma))


@pytest.mark.parametrize("elementwise", ["eager", "triton", "kitchen"])
def test_replays_of_larger_shapes_have_them_too(elementwise: str) -> None:
    plain, model = medium(elementwise), medium(elementwise)
    graphed(model, Graphs(CudaRecorder(GPU)))
    for sigma in (0.9, 0.5, 0.5, 0.1):
        got = velocity(model, conditioning(TAGS, references=(PICTURE,)), sigma, MEDIUM)
        want = velocity(plain, conditioning(TAGS, references=(PICTURE,)), sigma, MEDIUM)
        assert torch.equal(got, want)


@pytest.mark.parametrize("elementwise", ["eager", "triton"])
def test_requests_in_turn_read_nothing_of_each_other(elementwise: str) -> None:
    """Two lengths, two conditionings of one length, each again after memory was overwritten."""
    plain, model = tiny(False, elementwise=elementwise), tiny(True, elementwise=elementwise)
    first = conditioning(references=(PICTURE,))
    moved = replace(PICTURE, latent=normal(1, 24, 1, 2, 2) + 1)
    context = replace(first.context, context=first.context.context + 1)
    other = Conditioning(context=context, references=(moved,), keyframes=())
    cases = [(first, TARGET), (other, TARGET), (first, WIDE), (conditioning(), TARGET)] * 3
    for given, target in cases:
        spoil()
        got = velocity(model, given, 0.5, target)
        assert torch.equal(got, velocity(plain, given, 0.5, target))
    forward = model.__dict__["forward"]
    assert isinstance(forward, GraphedForward) and len(forward.graphs) == 3


def test_a_graph_that_was_given_up_is_captured_again_with_the_same_bits() -> None:
    plain, model = medium(), medium()
    graphs = Graphs(CudaRecorder(GPU), most=1)
    graphed(model, graphs)
    wider = replace(MEDIUM, latent_w=36)
    for target in (MEDIUM, wider, MEDIUM, MEDIUM, wider):
        spoil()
        got = velocity(model, conditioning(TAGS), 0.5, target)
        assert torch.equal(got, velocity(plain, conditioning(TAGS), 0.5, target))
        assert len(graphs) == 1


def test_graphs_share_their_activations_memory() -> None:
    model = medium()
    graphed(model, Graphs(CudaRecorder(GPU)))
    velocity(model, conditioning(TAGS), 0.5, MEDIUM)
    one = pool_bytes(model)
    assert one > 20 << 20, "an MLP of 2,000 rows takes more"
    for width in (24, 28, 20):
        velocity(model, conditioning(TAGS), 0.5, replace(MEDIUM, latent_w=width))
    assert pool_bytes(model) < 1.5 * one, "smaller shapes fit into what the first has taken"


def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    model = medium()
    graphed(model, Graphs(CudaRecorder(GPU), most=2))
    reserved = []
    for _ in range(3):
        for width in (16, 20, 24, 28, 32):
            velocity(model, conditioning(TAGS), 0.5, replace(MEDIUM, latent_w=width))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[1] + (8 << 20)


def test_a_whole_sample_with_guidance_has_the_same_bits() -> None:
    def sampled(model: H3Model) -> Tensor:
        with torch.inference_mode():
            return sample(
                side(model, conditioning(references=(PICTURE,)), TARGET),
                side(model, conditioning((1, 1, 1)), TARGET),
                cfg=4.0,
                sampler="res_multistep",
                sigmas=sigmas_for("beta", 6, 12.0),
                noise=draw_noise(TARGET, 3),
                start=None,
                on_step=lambda step: None,
            ).packed()

    plain, model = tiny(False, elementwise="triton"), tiny(True, elementwise="triton")
    want = sampled(plain)
    assert torch.equal(sampled(model), want)
    assert torch.equal(sampled(model), want)


def test_what_cannot_be_captured_is_said_in_one_sentence() -> None:
    """In a process of its own: torch's allocator stays upset after a capture that failed."""
    code = """
import torch
from runtime.graphs import CudaRecorder, Graphs
from runtime.kernels.unavailable import Unavailable
graphs = Graphs(CudaRecorder(torch.device("cuda")))
try:
    graphs.run("key", lambda own: (own[0] * float(own[0].sum()),), [torch.ones(4).cuda()], list)
except Unavailable as error:
    print(error)
"""
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = r"backend 'graphs' cannot run here: a step of this plan cannot be captured \(.+\); set"
    assert re.match(said, child.stdout), child.stdout + child.stderr
    assert child.stdout.count("\n") == 1


# ---- waits


@contextmanager
def waiting_is(mode: str) -> Iterator[None]:
    """torch's mode while entered; torch warns that it is a prototype as it is set."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode(mode)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wait_for_the_gpu_is_seen() -> None:
    x = torch.ones(3, device=GPU)
    with waiting_is("error"), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        bool(x.all())
    with waiting_is("error"), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.ones(3).to(GPU)
    assert bool(x.all())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("elementwise", ["eager", "triton"])
def test_an_evaluation_never_waits_for_the_gpu(graphs: bool, elementwise: str) -> None:
    model = tiny(graphs, elementwise=elementwise)
    given = conditioning(references=(PICTURE,))
    noise = draw_noise(TARGET, 5)
    with torch.inference_mode():
        built = side(model, given, TARGET)
        x = Latents(video=noise.video.to(GPU), audio=noise.audio.to(GPU))  # fp32 velocities
        built.build_tables(torch.tensor([0.5, 0.4]), [])
        built.velocity(x, torch.tensor(0.5))
        with waiting_is("error"):
            built.velocity(x, torch.tensor(0.4))


def test_a_step_waits_once() -> None:
    model = tiny(False, elementwise="triton")
    seen: list[int] = []
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        built = side(model, conditioning(references=(PICTURE,)), TARGET)
        with waiting_is("warn"):
            sample(
                built,
                None,
                cfg=1.0,
                sampler="res_multistep",
                sigmas=sigmas_for("beta", 5, 12.0),
                noise=draw_noise(TARGET, 3),
                start=None,
                on_step=lambda step: seen.append(
                    sum("called a synchronizing" in str(w.message) for w in caught)
                ),
            )
    # The second step has other spans than the first, at sigma 1, where all times are one.
    assert [b - a for a, b in itertools.pairwise(seen[1:])] == [1, 1, 1]
