"""Two GPUs: 18 of 28 heads there and back, attention over as many, and both at once.

`python -m tests.gpu.exchange_times`; one line of JSON. What attention hides of an exchange is their
sum less both at once (docs/experiments.md, "hiding an exchange behind attention").
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.kernels.attention import load_attention
from runtime.kernels.attention.base import AttentionOptions
from runtime.kernels.elementwise import load as load_elementwise
from runtime.kernels.unavailable import Unavailable
from runtime.parallel.carriers import carrier_of
from runtime.parallel.mesh import Exchange, Mesh
from runtime.parallel.shares import RowShares, row_shares
from runtime.parallel.turns import EDGES, counts_of, turns
from tests.gpu.test_parallel_gpu import TRANSPORTS, by, on_gpus

ROWS, HEADS, WIDTH = 20_094, 56, 128
TIMES = 20
GIVEN = ("NCCL_MAX_P2P_NCHANNELS", "TORCH_NCCL_HIGH_PRIORITY")  # told where they are set


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


def measured(mesh: Mesh, transport: str) -> dict[str, float] | str:
    """Of one transport, or why it is none; attention last again, as the chip is warm by then."""
    try:
        group = by(transport, mesh).rows
    except Unavailable as missing:
        return str(missing)
    counts, turn = row_shares(ROWS, group.size), turns(HEADS, group.size, EDGES)[1]
    own = counts[group.rank]
    qkv = torch.randn(own, 3, HEADS, WIDTH, device="cuda").bfloat16()
    here = counts_of(turn)[group.rank]
    q, k, v = (torch.randn(1, here, ROWS, WIDTH, device="cuda").bfloat16() for _ in range(3))
    attend = load_attention(
        "sdpa_cudnn", q.device, torch.bfloat16, AttentionOptions(), head_dim=WIDTH
    )
    carrier = carrier_of(group, RowShares(counts), load_elementwise("triton", q.device).copy)
    out = attend(q, k, v)[0]

    def exchange() -> Exchange:
        return carrier.there(qkv, turn, 0)

    def back() -> Tensor:
        return carrier.joined([carrier.back(out, turn, HEADS, 0)], [turn], HEADS, Exchange.wait)

    def both() -> None:
        under_way = exchange()
        attend(q, k, v)
        under_way.wait()

    alone = milliseconds(lambda: exchange().wait())
    milliseconds(lambda: attend(q, k, v))
    return {
        "exchange_ms": alone,
        "gb_per_s": own * 3 * here * WIDTH * qkv.itemsize / alone / 1e6,
        "back_ms": milliseconds(back),
        "both_ms": milliseconds(both),
        "attention_ms": milliseconds(lambda: attend(q, k, v)),
    }


def main() -> None:
    """What rank 0 measured of each transport."""
    told = {transport: on_gpus(measured, "U2", transport)[0] for transport in TRANSPORTS}
    given = {name: os.environ[name] for name in GIVEN if name in os.environ}
    print(json.dumps({**given, **told}), flush=True)


if __name__ == "__main__":
    main()
