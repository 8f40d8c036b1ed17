"""The loader's way to a GPU: the same bytes as on the CPU, and fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.checkpoints.demo import random_checkpoint, write_random
from runtime.checkpoints.file import open_file
from runtime.checkpoints.load import load_into
from tests.checkpoint_files import Packed, meta_module

pytestmark = pytest.mark.gpu


def test_tensors_arrive_on_the_gpu_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "vae.safetensors"
    write_random(path, "audio_vae", size="full", format="fp32")
    checkpoint = open_file(path, "audio_vae")
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name, "cuda")
        assert tensor.is_cuda
        assert torch.equal(tensor.cpu(), checkpoint.tensor(name)), name


def test_a_random_checkpoint_is_the_same_on_the_gpu() -> None:
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_nvfp4")
    for name in checkpoint.names():
        flat = [
            checkpoint.tensor(name, device).cpu().view(-1).view(torch.uint8)
            for device in ("cpu", "cuda")
        ]
        assert torch.equal(flat[0], flat[1]), name


def test_a_full_size_dit_loads_from_memory_faster_than_a_disk(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    path = folder / "h3_gpu_test_dit.safetensors"
    try:
        write_random(path, "dit", size="full", format="pruned_nvfp4")
        checkpoint = open_file(path, "dit")
        module = meta_module(checkpoint)
        report = load_into(
            module,
            checkpoint,
            device="cuda",
            dtype_of=lambda name, stored: stored,
            build_linear=lambda packed, old: Packed(packed),
        )
    finally:
        path.unlink(missing_ok=True)
    speed = report.bytes / report.seconds / 2**30
    print(f"{report.bytes:,} bytes in {report.seconds:.2f} s: {speed:.2f} GiB/s")
    assert torch.cuda.memory_allocated() >= report.bytes
    assert speed > 1.0
