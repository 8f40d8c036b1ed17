"""Two GPUs: a side of guidance on each, and packed NVFP4 rows by NCCL, against one GPU."""

from __future__ import annotations

import pytest
import torch
from comfy_kitchen.float_utils import from_blocked
from torch import Tensor

from runtime.h3.denoise import Shifts, Side, draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.kernels.linear.nvfp4_native import NVFP4Rows, activation_scale, quantise
from runtime.meter import COMMUNICATION, StepMeter
from runtime.parallel.mesh import ALONE, Mesh
from runtime.parallel.packed_rows import PackedGather, PackedReturn
from runtime.parallel.shares import RowShares, head_shares, ranges, row_shares
from runtime.parallel.sides import Sides
from tests.denoiser_parts import conditioning, demo_plan, normal
from tests.gpu.test_parallel_gpu import SIGMAS, TARGET, _weights, on_gpus

pytestmark = pytest.mark.multi_gpu

LENGTHS = (8, 127, 129, 1021, 20_511)
HIDDEN = 5376
CASES: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bf16", "attention": "sdpa_cudnn", "elementwise": "triton"},
    "nvfp4 fallback": {"dtype": "bf16", "nvfp4": "nvfp4_kitchen_fallback"},
}


def guided(mesh: Mesh, fields: dict[str, object]) -> tuple[Tensor, Tensor, float]:
    """Video and sound of four steps, and the seconds of waiting."""
    device = torch.device("cuda", torch.cuda.current_device())
    meter, plan = StepMeter("cuda"), demo_plan(device="cuda", **fields)
    model, _ = load_denoiser(_weights("nvfp4" in fields), plan, device, None, meter, mesh)
    with torch.inference_mode():
        positive, negative = (
            Side(model, conditioning(tags), TARGET, seed=7, shifts=Shifts(), device=device)
            for tags in ((1, 0, 0, 1, 1, 0, 1), (1, 1, 1))
        )
        meter.open()
        final = sample(
            positive,
            negative,
            cfg=3.5,
            sampler="res_multistep",
            sigmas=SIGMAS,
            noise=draw_noise(TARGET, 7),
            start=None,
            on_step=lambda step: None,
            sides=Sides.of(mesh, meter),
        )
        torch.cuda.synchronize()
        waited = meter.read(meter.close(), 100.0)[COMMUNICATION]
    return final.video.cpu(), final.audio.cpu(), waited


@pytest.mark.parametrize("name", list(CASES))
def test_a_side_on_each_gpu_gives_the_bits_of_one_gpu(name: str) -> None:
    video, audio, waited = guided(ALONE, CASES[name])
    assert waited == 0.0
    for rank in on_gpus(guided, "CFG2", CASES[name]):
        assert torch.equal(rank[0], video) and torch.equal(rank[1], audio) and rank[2] > 0


def packed(mesh: Mesh) -> list[int]:
    """The lengths of which all ranks got the integers that one GPU makes of all rows."""
    passed = []
    for num_rows in LENGTHS:
        x_SK = normal(num_rows, HIDDEN).to("cuda", torch.bfloat16)
        scale = activation_scale(x_SK, None)
        counts = row_shares(num_rows, mesh.rows.size)
        own = x_SK[ranges(counts)[mesh.rows.rank]]
        mine = NVFP4Rows(*quantise(own, scale), scale, len(own), own.dtype)
        got = PackedGather(mesh.rows, RowShares(counts))(mine)
        codes, blocks = quantise(x_SK, scale)
        assert torch.equal(got.codes[:num_rows], codes[:num_rows]), num_rows
        assert got.blocks.shape == blocks.shape and got.codes.shape == codes.shape
        assert torch.equal(plain(got.blocks, num_rows), plain(blocks, num_rows)), num_rows
        passed.append(num_rows)
    return passed


def plain(blocks: Tensor, num_rows: int, width: int = HIDDEN) -> Tensor:
    """[S, K/16] bytes, without what fills up the tiles."""
    return from_blocked(blocks.view(torch.uint8), num_rows, width // 16)


def returned(mesh: Mesh) -> list[int]:
    """The lengths of which each rank got its rows of the integers that one GPU makes of all."""
    passed, width = [], 56 * 128
    widths = [count * 128 for count in head_shares(56, mesh.rows.size)]
    for num_rows in LENGTHS:
        x_SK = normal(num_rows, width).to("cuda", torch.bfloat16)
        scale = activation_scale(x_SK, None)
        counts = row_shares(num_rows, mesh.rows.size)
        own = x_SK[:, ranges(widths)[mesh.rows.rank]].contiguous()
        mine = NVFP4Rows(*quantise(own, scale), scale, num_rows, own.dtype)
        got = PackedReturn(mesh.rows, RowShares(counts))(mine, widths)
        codes, blocks = quantise(x_SK, scale)
        here = ranges(counts)[mesh.rows.rank]
        assert torch.equal(got.codes[: got.num_rows], codes[here]), num_rows
        told = plain(got.blocks, got.num_rows, width)
        assert torch.equal(told, plain(blocks, num_rows, width)[here]), num_rows
        passed.append(num_rows)
    return passed


@pytest.mark.parametrize("name", ["U2", "U4", "U8"])
def test_packed_rows_come_through_nccl(name: str) -> None:
    assert on_gpus(packed, name) == [list(LENGTHS)] * int(name[1:])
    assert on_gpus(returned, name) == [list(LENGTHS)] * int(name[1:])
