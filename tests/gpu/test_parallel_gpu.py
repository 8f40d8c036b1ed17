"""Two GPUs: the exchange by NCCL, and the denoiser on two ranks against one GPU, step by step."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.checkpoints.demo import checkpoint_of
from runtime.checkpoints.layouts import NVFP4, DitDims, Recipe, dit, layout, quantised
from runtime.engine import Engine
from runtime.h3.denoise import Shifts, Side, draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.h3.packing import TargetShape
from runtime.kernels.attention.base import Attend
from runtime.kernels.linear import linear_backend
from runtime.layouts import Layout
from runtime.messages import Event, Failure, Progress, Ready, Ref2VARequest
from runtime.meter import ALL_COMMUNICATION, COMMUNICATION, StepMeter
from runtime.parallel.copy_engine import by_copy_engine
from runtime.parallel.mesh import ALONE, Exchange, Mesh, mesh_of
from runtime.parallel.shares import RowShares, head_shares, ranges, row_shares
from runtime.parallel.turns import EDGES, HALVES
from runtime.parallel.ulysses import Ulysses
from tests.denoiser_parts import conditioning, demo_plan

pytestmark = pytest.mark.multi_gpu

LENGTHS = (8, 13, 67, 1021, 20094, 20511)
HEADS, WIDTH = 56, 8
DIMS = DitDims(hidden=256, ffn=1024, blocks=3, refiner_blocks=1, text_dim=16, grid=129)
TARGET = TargetShape(latent_t=5, latent_h=18, latent_w=22, audio_t=25)  # 495 and 50 rows
SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
# Products over fewer rows may run as other kernels. On a CPU whose bf16 products do, the same cases
# stay within 5e-2 where NVFP4 codes flip with that; its shared scale itself is tested to the bit.
BF16_LIMIT, QUANTISED_LIMIT = 2e-2, 8e-2
CASES: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bf16", "attention": "sdpa_cudnn", "elementwise": "triton"},
    "memory low": {"dtype": "bf16", "attention": "sdpa_cudnn", "memory": "low"},
    "fp8_tensorwise": {"dtype": "bf16", "dense": "fp8_tensorwise", "elementwise": "triton"},
    "nvfp4 fallback": {"dtype": "bf16", "nvfp4": "nvfp4_kitchen_fallback"},
    "fp32": {"dtype": "fp32"},
    "overlap": {
        "dtype": "bf16",
        "attention": "sdpa_cudnn",
        "elementwise": "triton",
        "overlap": "qkv",
    },
    "fp8_rowwise": {"dtype": "bf16", "dense": "fp8_rowwise", "elementwise": "triton"},
    "overlap fp8": {
        "dtype": "bf16",
        "dense": "fp8_rowwise",
        "elementwise": "triton",
        "overlap": "qkv",
    },
    "overlap nvfp4": {"dtype": "bf16", "nvfp4": "nvfp4_kitchen_fallback", "overlap": "qkv"},
    "copies": {
        "dtype": "bf16",
        "attention": "sdpa_cudnn",
        "elementwise": "triton",
        "transport": "copy_engine",
    },
    "quack": {"dtype": "bf16", "dense": "quack", "elementwise": "triton"},
}
LIMITS = {
    "bf16": BF16_LIMIT,
    "memory low": BF16_LIMIT,
    "fp8_tensorwise": QUANTISED_LIMIT,
    "nvfp4 fallback": QUANTISED_LIMIT,
    "fp32": 1e-5,
    "overlap": BF16_LIMIT,
    "overlap nvfp4": QUANTISED_LIMIT,
    "fp8_rowwise": QUANTISED_LIMIT,
    "overlap fp8": QUANTISED_LIMIT,
    "copies": BF16_LIMIT,
    "quack": BF16_LIMIT,
}
TRANSPORTS = ("collective", "copy_engine")


def on_gpus(work: Callable[..., Any], name: str, *args: object) -> list[Any]:
    """What work(mesh, *args) returned on each rank of that layout, each on a GPU of its own."""
    ranks = Layout.parse(name).ranks
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{name} needs {ranks} GPUs")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="h3-test-gpus-") as folder:
        processes = [
            context.Process(target=_rank, args=(rank, name, folder, work, args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * ranks
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _rank(
    rank: int, name: str, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=Layout.parse(name).ranks,
        device_id=torch.device("cuda", rank),
    )
    found = work(mesh_of(Layout.parse(name)), *args)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.cuda.synchronize()
    dist.destroy_process_group()


def by(transport: str, mesh: Mesh) -> Mesh:
    """The mesh whose rows travel so."""
    if transport == "collective":
        return mesh
    device = torch.device("cuda", torch.cuda.current_device())
    return replace(mesh, rows=by_copy_engine(mesh.rows, device))


def attending(attend: Attend, mesh: Mesh, counts: tuple[int, ...]) -> Ulysses:
    """As share_rows makes it."""
    parts = HALVES if mesh.rows.copies is None else EDGES
    return Ulysses(attend, mesh.rows, RowShares(counts), Exchange.wait, parts)


def carried(mesh: Mesh, transport: str) -> list[int]:
    """The lengths of which every row and head came through the exchange and back."""
    mesh, passed = by(transport, mesh), []
    for num_rows in LENGTHS:
        counts = row_shares(num_rows, mesh.rows.size)
        heads = ranges(head_shares(HEADS, mesh.rows.size))[mesh.rows.rank]
        whole = torch.arange(num_rows * 3 * HEADS, device="cuda", dtype=torch.int32)
        whole = whole.view(num_rows, 3, HEADS, 1).expand(-1, -1, -1, WIDTH)
        seen = []

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            whole: Tensor = whole,
            seen: list[int] = seen,
            first: int = heads.start,
        ) -> Tensor:
            start = first + sum(seen)
            seen.append(q.shape[1])
            for part, x in enumerate((q, k, v)):
                want = whole[:, part, start : start + q.shape[1]]
                assert torch.equal(x[0].transpose(0, 1), want), (part, x.shape)
            return (q + v).transpose(1, 2).flatten(2)

        own = whole[ranges(counts)[mesh.rows.rank]]
        ulysses = attending(attend, mesh, counts)
        got = ulysses(*(x[None].transpose(1, 2) for x in own.unbind(1)))
        assert torch.equal(got, (own[:, 0] + own[:, 2]).flatten(1)[None]), num_rows
        assert sum(seen) == heads.stop - heads.start
        passed.append(num_rows)
    return passed


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["U2", "U4", "U6", "U7", "U8"])
def test_every_row_and_head_comes_through_and_back(name: str, transport: str) -> None:
    assert on_gpus(carried, name, transport) == [list(LENGTHS)] * Layout.parse(name).ranks


def sampled(mesh: Mesh, cases: dict[str, dict[str, object]]) -> dict[str, dict[str, Tensor]]:
    """By case: the velocities of both streams at every step, and the seconds of waiting."""
    found = {}
    for name, fields in cases.items():
        plan = demo_plan(device="cuda", **fields)
        meter = StepMeter("cuda")
        device = torch.device("cuda", torch.cuda.current_device())
        model, _ = load_denoiser(_weights("nvfp4" in fields), plan, device, None, meter, mesh)
        kept: dict[str, Tensor] = {}
        with torch.inference_mode():
            side = Side(
                model,
                conditioning((1, 0, 0, 1, 1, 0, 1)),
                TARGET,
                seed=7,
                shifts=Shifts(),
                device=device,
            )
            meter.open()
            sample(
                side,
                None,
                cfg=1.0,
                sampler="euler",
                sigmas=SIGMAS,
                noise=draw_noise(TARGET, 7),
                start=None,
                on_step=lambda step: None,
                tap=lambda key, value, kept=kept: kept.update({key: value.cpu()}),
            )
            torch.cuda.synchronize()
            parts = meter.read(meter.close(), 100.0)
        kept["waited"] = torch.tensor(parts[COMMUNICATION])
        kept["moving"] = torch.tensor(parts.get(ALL_COMMUNICATION, 0.0))
        found[name] = kept
    return found


def _weights(nvfp4: bool) -> Any:
    def choose(layer: str, shape: tuple[int, ...]) -> Recipe | None:
        del shape
        block = layer.startswith("blocks.") and "adaln_proj" not in layer
        return Recipe(marker=NVFP4) if block else None

    specs = dit(DIMS, pruned=True, adaln="F32")
    tensors = list(quantised(specs, choose) if nvfp4 else specs)
    return checkpoint_of(layout(tensors, {"format": "pt"}), "dit", size="tiny", name="gpu")


@pytest.mark.parametrize("name", ["U2", "TP2", "TP2xU2", "TP3", "TP6", "TP2xU3", "U6"])
def test_ranks_compute_what_one_gpu_does_at_every_step(name: str) -> None:
    cases = {n: f for n, f in CASES.items() if not (name.startswith("TP") and _fp8(f))}
    if linear_backend("quack").reason(torch.device("cuda")):  # not Hopper, or not installed
        del cases["quack"]
    ranks = on_gpus(sampled, name, cases)
    alone = sampled(ALONE, cases)
    for case, want in alone.items():
        assert float(want.pop("waited")) == float(want.pop("moving")) == 0.0
        for rank in ranks:
            waited, moving = (float(rank[case].pop(part)) for part in ("waited", "moving"))
            print(f"{name} {case}: {waited:.4f} s exposed of {moving:.4f} s")
            assert waited > 0 and moving > 0
        for key, value in want.items():
            first = ranks[0][case][key]
            assert all(torch.equal(rank[case][key], first) for rank in ranks), (case, key)
            error = float((first.double() - value.double()).norm() / value.double().norm())
            print(f"{name} {case} {key}: {error:.2e}")
            assert error <= LIMITS[case], (case, key, error)
    if name.startswith("U"):  # where cuBLAS takes the same kernel for fewer columns
        for more, plain in (
            ("overlap", "bf16"),
            ("overlap nvfp4", "nvfp4 fallback"),
            ("overlap fp8", "fp8_rowwise"),
            ("copies", "bf16"),
        ):
            got, off = ranks[0][more], ranks[0][plain]
            same = sum(torch.equal(got[key], off[key]) for key in off)
            print(f"{name} {more}: {same} of {len(off)} tensors have the bits of overlap off")


def _fp8(fields: dict[str, object]) -> bool:
    return str(fields.get("dense", "")).startswith("fp8")


def reused(mesh: Mesh, transport: str) -> bool:
    """Memory that is given back and written over at once, while exchanges are under way."""
    mesh, rows, width = by(transport, mesh), 4096, 128
    counts = row_shares(rows, mesh.rows.size)
    own = ranges(counts)[mesh.rows.rank]
    factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factor @ factor  # the device stays behind the host
        out = (q + k + v).transpose(1, 2).flatten(2)
        torch.empty_like(q, memory_format=torch.contiguous_format).fill_(float("nan"))
        return out

    ulysses = attending(attend, mesh, counts)
    same = True
    for turn in range(30):
        made = torch.Generator("cuda").manual_seed(turn)
        whole = torch.randn(rows, 3, HEADS, width, device="cuda", generator=made)
        sent = whole[own].clone()
        got = ulysses(*(x[None].transpose(1, 2) for x in sent.unbind(1)))
        del sent
        torch.empty(len(whole[own]), 3, HEADS, width, device="cuda").fill_(float("nan"))
        q, k, v = whole[own].unbind(1)
        same &= torch.equal(got[0], (q + k + v).flatten(1))
    return same


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["U2", "U4"])
def test_memory_is_not_used_again_while_an_exchange_reads_or_writes_it(
    name: str, transport: str
) -> None:
    assert on_gpus(reused, name, transport) == [True] * Layout.parse(name).ranks


def opened_late(mesh: Mesh) -> list[bool]:
    """Exchanges that open windows while one rank's default stream is far behind, by turns."""
    rows, found = by("copy_engine", mesh).rows, []
    for n in range(1, 2 * rows.size + 1):
        torch.cuda.synchronize()
        if n % rows.size == rows.rank:
            torch.cuda._sleep(1_000_000_000)
        sent = torch.full((rows.size * n,), float(rows.rank), device="cuda")
        got = rows.exchange(sent, [n] * rows.size, [n] * rows.size).wait()
        want = torch.arange(rows.size, device="cuda", dtype=sent.dtype).repeat_interleave(n)
        found.append(torch.equal(got, want))
    return found


@pytest.mark.parametrize("name", ["U2", "U4"])
def test_a_window_is_used_once_all_of_it_is_there(name: str) -> None:
    ranks = Layout.parse(name).ranks
    assert on_gpus(opened_late, name) == [[True] * 2 * ranks] * ranks


def test_a_cancel_in_the_decode_ends_both_ranks(tmp_path: Path) -> None:
    plan = demo_plan(device="cuda", layout="U2", text_encoder="resident")
    if torch.cuda.device_count() < 2:
        pytest.skip("U2 needs 2 GPUs")
    request = Ref2VARequest(id="r", prompt="a calm sea", width=64, height=288, frames=209, steps=1)
    with Engine(plan) as engine:
        assert isinstance(list(engine.start())[-1], Ready)
        last: Event | None = None
        for last in engine.generate(request, out=tmp_path, media=False, preview=False):
            if isinstance(last, Progress) and (last.stage, last.done) == ("video VAE decode", 1):
                engine.cancel("r")
    assert isinstance(last, Failure) and last.cancelled, last
