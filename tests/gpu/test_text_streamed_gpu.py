"""A text encoder in layers on a GPU: the bits of the resident one, and the memory of two layers."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app import memory
from app.memory import Shape
from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.classify import classify
from runtime.checkpoints.demo import random_checkpoint, write_random
from runtime.checkpoints.header import read_header
from runtime.h3.text import TextEncoder, VisionBlock
from runtime.h3.text_streamed import LayeredTextEncoder
from runtime.messages import ModelFiles, Plan
from tests.unit.full_size import write_sparse

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
TOKENS = 700
REAL, TINY = (8, 16, 24), (0, 1, 2)
SLACK = 600 << 20  # blocks of the generator of random weights, and rounding of the allocator


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("format", ["bf16", "nvfp4_awq"])
def test_it_gives_the_resident_encoders_bits(format: str, tmp_path: Path) -> None:
    file = tmp_path / "text.safetensors"
    write_random(file, "text_encoder", size="tiny", format=format)
    picture = VisionBlock(frames=torch.rand(1, 64, 96, 3), is_video=False)
    tokens = (11, 12, picture, *range(100, 400))
    checkpoint = open_checkpoint(file, "text_encoder")
    resident = TextEncoder(checkpoint, device=GPU, deepstack_layers=TINY)
    layered = LayeredTextEncoder(checkpoint, device=GPU, deepstack_layers=TINY)
    for _ in range(3):
        assert torch.equal(layered.encode(tokens).context, resident.encode(tokens).context)


@pytest.mark.parametrize("format", ["nvfp4_awq", "bf16"])
def test_at_full_size_it_stays_within_what_the_planner_counts(format: str) -> None:
    checkpoint = random_checkpoint("text_encoder", size="full", format=format)
    encoder = LayeredTextEncoder(checkpoint, device=GPU, deepstack_layers=REAL)
    picture = VisionBlock(frames=torch.rand(1, 544, 960, 3), is_video=False)
    tokens = (11, picture, *range(1000, 1000 + TOKENS))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    context = encoder.encode(tokens)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        file = write_sparse(Path(folder) / "text.safetensors", "text_encoder", format)
        part = classify(read_header(file)).parts[0]
    shape = Shape(
        rows=0,
        text_rows=context.context.shape[1],
        vision_tokens=context.context.shape[1] - TOKENS - 1,
        images=True,
        video_pixels=0,
        sound_latents=0,
        audio_latents=0,
    )
    files = ModelFiles(dit=Path(), text_encoder=Path(), video_vae=Path(), audio_vae=Path())
    plan = Plan(name="x", models=files, text_encoder="layers")
    counted = memory.text_phase(part, plan, shape)
    print(f"\n{format}: {peak / 2**30:.2f} GiB, counted {counted / 2**30:.2f}, {seconds:.2f} s")
    assert bool(context.context.isfinite().all())
    assert peak <= 1.05 * counted + SLACK
    assert torch.cuda.memory_allocated() - before <= SLACK
