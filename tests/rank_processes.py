"""Runs a function on several CPU ranks at once: gloo processes that meet in a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from runtime.layouts import Layout
from runtime.parallel.mesh import Mesh, mesh_of


def on_ranks(work: Callable[..., Any], layout: str, *args: object) -> list[Any]:
    """What work(mesh, *args) returned on each rank, in order; an error of one is raised here."""
    ranks = Layout.parse(layout).ranks
    with tempfile.TemporaryDirectory(prefix="h3-test-ranks-") as folder:
        mp.spawn(_rank, (ranks, layout, folder, work, args), nprocs=ranks)
        return [
            torch.load(f"{folder}/{rank}.pt", weights_only=False)  # written by `_rank`
            for rank in range(ranks)
        ]


def _rank(
    rank: int, ranks: int, layout: str, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    mesh: Mesh = mesh_of(Layout.parse(layout))
    torch.save(work(mesh, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
