"""Time of every attention backend at the reference shapes: `python -m tests.gpu.attention_times`.

One call at a time, backends interleaved round by round so that clocks drift alike for all. The last
line is JSON. The input is Gaussian: sparse backends lie far from exact ones on it, which says
nothing of pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from torch import Tensor

from runtime.kernels.attention import (
    BACKENDS,
    Attend,
    AttentionOptions,
    PackedRows,
    attention_backend,
    load_attention,
)
from runtime.kernels.unavailable import Unavailable
from runtime.machine import driver

CUDA = torch.device("cuda")
HEADS, DIM = 56, 128
TEXT_ROWS = {20094: 300, 20511: 717}  # packed rows -> conditioning rows of that request
WARM_UP = 3
REFERENCE = "sdpa_cudnn"


def packed_views(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(rows)
    shape = (rows, 3 * HEADS * DIM)
    qkv = torch.randn(shape, device=CUDA, dtype=torch.bfloat16, generator=generator)
    q, k, v = (t.unflatten(-1, (HEADS, DIM)) for t in qkv.chunk(3, dim=-1))
    return q[None].transpose(1, 2), k[None].transpose(1, 2), v.clone()[None].transpose(1, 2)


def milliseconds(attend: Attend, qkv: tuple[Tensor, Tensor, Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    attend(*qkv)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def ready(
    names: list[str], options: AttentionOptions, qkv: tuple[Tensor, Tensor, Tensor]
) -> tuple[dict[str, Attend], dict[str, Tensor], dict[str, str]]:
    """(backends that run, their results, reasons of the others), warmed up."""
    able, results, reasons = {}, {}, {}
    for name in names:
        try:
            attend = load_attention(name, CUDA, torch.bfloat16, options)
            for _ in range(WARM_UP):
                results[name] = attend(*qkv)
            torch.cuda.synchronize()
            able[name] = attend
        except Unavailable as error:
            reasons[name] = error.reason
        except Exception as error:  # a kernel that fails here must not cost the others' figures
            reasons[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return able, results, reasons


def measured(rows: int, names: list[str], rounds: int, tau: float) -> dict[str, object]:
    options = AttentionOptions(sol_tau=tau, rows=PackedRows(conditioning=TEXT_ROWS.get(rows, 0)))
    qkv = packed_views(rows)
    able, results, reasons = ready(names, options, qkv)
    want = results.get(REFERENCE)
    distance = {n: _distance(out, want) for n, out in results.items() if want is not None}
    results.clear()
    taken: dict[str, list[float]] = {name: [] for name in able}
    for _ in range(rounds):
        for name, attend in able.items():
            taken[name].append(milliseconds(attend, qkv))
    flops = 4 * rows * rows * HEADS * DIM
    found: dict[str, object] = {}
    for name, times in taken.items():
        median = statistics.median(times)
        found[name] = {
            "median_ms": round(median, 3),
            "min_ms": round(min(times), 3),
            "max_ms": round(max(times), 3),
            "tflops": round(flops / median / 1e9, 1),
            f"relative_l2_to_{REFERENCE}": distance.get(name),
            "route": attention_backend(name).route(CUDA, options),
        }
        print(f"{rows:6d} {name:17s} {median:8.2f} ms  {found[name]}", flush=True)
    for name, reason in reasons.items():
        print(f"{rows:6d} {name:17s} not here: {reason}", flush=True)
    return {"backends": found, "unavailable": reasons, "conditioning": options.rows.conditioning}


def _distance(out: Tensor, want: Tensor | None) -> float | None:
    if want is None:
        return None
    return float((out.float() - want.float()).norm() / want.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(TEXT_ROWS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--tau", type=float, default=1.0)
    asked = parser.parse_args()
    with torch.inference_mode():
        shapes = {
            rows: measured(rows, asked.backends, asked.rounds, asked.tau) for rows in asked.rows
        }
    about = {
        "device": torch.cuda.get_device_name(),
        "driver": driver(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "heads": HEADS,
        "dim": DIM,
        "dtype": "bf16",
        "rounds": asked.rounds,
        "warm_up": WARM_UP,
        "rows": shapes,
    }
    print(json.dumps(about))


if __name__ == "__main__":
    main()
