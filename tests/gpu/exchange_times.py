"""Two GPUs: an exchange of 18 heads, attention over as many, and both at once.

`python -m tests.gpu.exchange_times`; one line of JSON. What attention hides of an exchange is their
sum less both at once (docs/experiments.md, "hiding an exchange behind attention").
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from runtime.kernels.attention import load_attention
from runtime.kernels.attention.base import AttentionOptions
from runtime.kernels.unavailable import Unavailable
from runtime.layouts import Layout
from runtime.parallel.copy_engine import by_copy_engine
from runtime.parallel.mesh import Group, mesh_of
from runtime.parallel.shares import row_shares

ROWS, HEADS, WIDTH = 20_094, 18, 128
TIMES = 20


def milliseconds(call: Callable[[], object]) -> float:
    """Mean of TIMES after one that does not count."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TIMES):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / TIMES


def measured(group: Group) -> dict[str, float]:
    """Of one way to exchange; attention last again, as the chip is warm by then."""
    counts = row_shares(ROWS, group.size)
    of_a_row = 3 * HEADS * WIDTH
    own = counts[group.rank] * of_a_row
    sent = torch.randn(group.size * own, device="cuda").bfloat16()
    q, k, v = (torch.randn(1, HEADS, ROWS, WIDTH, device="cuda").bfloat16() for _ in range(3))
    device = torch.device("cuda", torch.cuda.current_device())
    attend = load_attention(
        "sdpa_cudnn", device, torch.bfloat16, AttentionOptions(), head_dim=WIDTH
    )

    def exchange() -> Tensor:
        sizes = [count * of_a_row for count in counts]
        return group.exchange(sent, [own] * group.size, sizes).wait()

    def both() -> None:
        sizes = [count * of_a_row for count in counts]
        under_way = group.exchange(sent, [own] * group.size, sizes)
        attend(q, k, v)
        under_way.wait()

    alone = milliseconds(exchange)
    milliseconds(lambda: attend(q, k, v))
    return {
        "exchange_ms": alone,
        "gb_per_s": (group.size - 1) * own * sent.itemsize / alone / 1e6,
        "both_ms": milliseconds(both),
        "attention_ms": milliseconds(lambda: attend(q, k, v)),
    }


def rank_of(rank: int, store: str) -> None:
    """One rank; rank 0 prints."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    rows = mesh_of(Layout.parse("U2")).rows
    told: dict[str, object] = {"collective": measured(rows)}
    try:
        told["copy_engine"] = measured(by_copy_engine(rows, torch.device("cuda", rank)))
    except Unavailable as missing:
        told["copy_engine"] = str(missing)
    if rank == 0:
        names = ("NCCL_MAX_P2P_NCHANNELS", "TORCH_NCCL_HIGH_PRIORITY")
        given = {name: os.environ[name] for name in names if name in os.environ}
        print(json.dumps({**given, **told}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Both GPUs at once."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, args=(f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
