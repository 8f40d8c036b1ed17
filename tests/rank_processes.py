"""Runs a function on several CPU ranks at once: gloo processes that meet in a folder.

They are pinned as the test process is (conftest.py), or their products would differ by the kernel
that is chosen, not by the ranks. They are forked from a server that has imported what they need:
an import of torch for each of eight ranks takes longer than most tests.
"""

# ruff: noqa: E402
from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.parity.cpu import pin

PINNED = pin()  # the server imports this file first of all, before torch

import torch.distributed as dist

from runtime.layouts import Layout
from runtime.parallel.mesh import mesh_of


def on_ranks(work: Callable[..., Any], layout: str, *args: object) -> list[Any]:
    """What work(mesh, *args) returned on each rank, in order; an error of one is raised here."""
    ranks = Layout.parse(layout).ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.denoiser_parts", "tests.wide_denoiser"])
    with tempfile.TemporaryDirectory(prefix="h3-test-ranks-") as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, layout, folder, work, args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        for rank in range(ranks):
            if (Path(folder) / f"{rank}.error").exists():
                raise AssertionError((Path(folder) / f"{rank}.error").read_text(encoding="utf-8"))
        return [
            pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(ranks)
        ]


def _rank(
    rank: int, ranks: int, layout: str, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        found = work(mesh_of(Layout.parse(layout)), *args)
        Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
        dist.barrier()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    dist.destroy_process_group()
