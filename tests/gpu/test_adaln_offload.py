"""A full checkpoint's AdaLN weights off the GPU: its memory, and the bits of the tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from tests.checkpoint_files import tiny
from tests.denoiser_parts import demo_plan

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TIMES = [torch.tensor([t, t + 0.25, 0.999]) for t in (0.0, 0.1, 0.2)]


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def model_of(adaln: str, file: Path | None = None) -> H3Model:
    plan = demo_plan(device="cuda", dtype="bf16", adaln=adaln)
    checkpoint = (
        random_checkpoint("dit", size="tiny", format="full_bf16")
        if file is None
        else open_checkpoint(file, "dit")
    )
    return load_denoiser(checkpoint, plan, GPU)[0]


def adaln_bytes(model: H3Model) -> int:
    return sum(p.nbytes for layer in model.adaln_layers for p in layer.parameters())


def flat(model: H3Model) -> list[Tensor]:
    with torch.inference_mode():
        return [t for tables in model.modulation(TIMES) for layer in tables for t in layer]


def test_tables_of_offloaded_weights_are_bit_equal() -> None:
    want, got = flat(model_of("resident")), flat(model_of("offloaded"))
    assert all(t.is_cuda for t in got)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_offloaded_weights_take_no_device_memory_before_and_after_a_schedule() -> None:
    before = allocated()
    resident = model_of("resident")
    of_adaln, held = adaln_bytes(resident), allocated() - before
    del resident
    before = allocated()
    model = model_of("offloaded")
    loaded = allocated() - before
    assert loaded <= held - 0.95 * of_adaln
    with torch.inference_mode():
        tables = model.modulation(TIMES)
    assert {p.device.type for layer in model.adaln_layers for p in layer.parameters()} == {"meta"}
    del tables
    assert allocated() - before <= loaded + (64 << 10)


def test_one_layer_at_a_time_is_on_the_device() -> None:
    model = model_of("offloaded")
    start = allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        tables = model.modulation(TIMES)
    kept = sum(t.nbytes for step in tables for layer in step[:1] for t in layer)
    held = kept * len(model.adaln_layers)
    peak = torch.cuda.max_memory_allocated() - start
    (layer,) = (sum(p.nbytes for p in layer.parameters()) for layer in model.adaln_layers[:1])
    assert layer < peak < held + 1.5 * layer + (64 << 10)


def test_weights_read_again_from_a_file_have_the_same_bits(tmp_path: Path) -> None:
    path = tiny(tmp_path, "dit", "full_bf16")
    want, got = flat(model_of("resident", path)), flat(model_of("offloaded", path))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
