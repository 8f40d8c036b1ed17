"""A full checkpoint's AdaLN weights off the GPU: its memory, and the bits of the tables.

Over a file: a random checkpoint keeps blocks of its numbers on the GPU for as long as it is open,
which an offloaded model's is.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from tests.checkpoint_files import tiny
from tests.denoiser_parts import demo_plan

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TIMES = [torch.tensor([t, t + 0.25, 0.999]) for t in (0.0, 0.1, 0.2)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Made after a first product: cuBLAS's workspace counts as allocated and stays."""
    path = tiny(tmp_path, "dit", "full_bf16")
    flat(model_of("resident", path))
    return path


def allocated() -> int:
    gc.collect()  # an offloaded model and what lends its layers refer to each other
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def model_of(adaln: str, file: Path) -> H3Model:
    plan = demo_plan(device="cuda", dtype="bf16", adaln=adaln)
    return load_denoiser(open_checkpoint(file, "dit"), plan, GPU)[0]


def adaln_bytes(model: H3Model) -> int:
    return sum(p.nbytes for layer in model.adaln_layers for p in layer.parameters())


def flat(model: H3Model) -> list[Tensor]:
    with torch.inference_mode():
        return [t for tables in model.modulation(TIMES) for layer in tables for t in layer]


def test_tables_of_offloaded_weights_are_bit_equal_each_time(file: Path) -> None:
    want, model = flat(model_of("resident", file)), model_of("offloaded", file)
    for got in (flat(model), flat(model)):
        assert all(t.is_cuda for t in got)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_offloaded_weights_take_no_device_memory_before_and_after_a_schedule(file: Path) -> None:
    before = allocated()
    resident = model_of("resident", file)
    of_adaln, held = adaln_bytes(resident), allocated() - before
    del resident
    before = allocated()
    model = model_of("offloaded", file)
    loaded = allocated() - before
    assert loaded <= held - of_adaln
    with torch.inference_mode():
        tables = model.modulation(TIMES)
    assert {p.device.type for layer in model.adaln_layers for p in layer.parameters()} == {"meta"}
    del tables
    assert allocated() - before <= loaded + (64 << 10)


def test_one_layer_at_a_time_is_on_the_device(file: Path) -> None:
    model = model_of("offloaded", file)
    start = allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        tables = model.modulation(TIMES)
    kept = sum(t.nbytes for step in tables for layer in step for t in layer)
    peak = torch.cuda.max_memory_allocated() - start
    layer = sum(p.nbytes for p in model.adaln_layers[0].parameters())
    assert layer < peak < kept + 1.25 * layer + (32 << 10)
