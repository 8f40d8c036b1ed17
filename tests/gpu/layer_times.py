"""One block's products, attention and SwiGLU under load: `python -m tests.gpu.layer_times`, last
line JSON.

A card at its power cap turns what a kernel saves in energy into clocks, so each form runs for
SECONDS at a time, in turns with the others, after a tenth of that without being timed. H3's sizes
in bf16, random; of two ranks that share rows each has half of the rows and of the heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from runtime.kernels.attention import load_attention
from runtime.kernels.attention.base import AttentionOptions
from runtime.kernels.elementwise import load
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.quack import QuackLinear
from runtime.machine import driver
from runtime.probes.base import version_of
from tests.gpu.linear_times import LAYERS, layer

HEADS, WIDTH = 56, 128
PACKAGES = ("torch", "triton", "quack-kernels", "nvidia-cutlass-dsl", "flash-attn-4")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_094, help="of the request")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--attention", default="fa4")
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = torch.device("cuda")
    attend = load_attention(args.attention, device, torch.bfloat16, AttentionOptions())
    swiglu = load("triton", device).swiglu
    torch.manual_seed(0)
    weights = {
        name: (torch.randn(features, width, device=device) * 0.02).to(torch.bfloat16)
        for name, (width, features) in LAYERS.items()
    }
    made = {
        backend: {name: linear_backend(backend).build(layer(w)) for name, w in weights.items()}
        for backend in ("dense", "quack")
    }
    fc1 = made["quack"]["fc1"]
    assert isinstance(fc1, QuackLinear)
    fc1.gated = True
    found: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for ranks in args.ranks:
            own = -(-args.rows // ranks)
            x, a = (
                torch.randn(own, width, device=device).to(torch.bfloat16)
                for width in (LAYERS["qkv"][0], LAYERS["out"][0])
            )
            shape = (1, HEADS // ranks, args.rows, WIDTH)
            qkv = [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(3)]
            attended = partial(attend, *qkv)
            forms = {
                "dense": partial(block, made["dense"], attended, x, a, swiglu),
                "quack": partial(block, made["quack"], attended, x, a, lambda h: h),
            }
            found[f"{ranks} ranks"] = told = in_turns(forms, args.seconds, args.rounds)
            medians = {name: statistics.median(times) for name, times in told.items()}
            for name, ms in medians.items():
                ratio = ms / medians["dense"]
                print(f"{ranks} ranks, {own} rows: {name:6s} {ms:8.4f} ms a block, {ratio:.4f}")
    print(
        json.dumps(
            {
                "rows": args.rows,
                "attention": args.attention,
                "seconds": args.seconds,
                "rounds": args.rounds,
                "device": torch.cuda.get_device_name(device),
                "driver": driver(),
                "versions": {name: version_of(name) for name in PACKAGES},
                "ms_a_block": found,
            }
        )
    )


def block(
    linears: dict[str, nn.Module],
    attended: Callable[[], Tensor],
    x_SD: Tensor,
    a_SI: Tensor,
    swiglu: Callable[[Tensor], Tensor],
) -> None:
    """Its large steps in their order; each has an input of its own."""
    linears["qkv"](x_SD)
    attended()
    linears["out"](a_SI)
    linears["fc2"](swiglu(linears["fc1"](x_SD)))


def in_turns(
    forms: Mapping[str, Callable[[], None]], seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of a call, by form and round."""
    first = next(iter(forms.values()))
    for call in forms.values():
        call()  # compiles
    for _ in range(3):
        window(first, seconds)
    found: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(rounds):
        for name in list(forms)[:: 1 - 2 * (number % 2)]:
            window(forms[name], 0.1 * seconds)
            found[name].append(window(forms[name], seconds))
    return found


def window(call: Callable[[], None], seconds: float) -> float:
    """Mean milliseconds of a call over that time."""
    count = max(3, int(1000 * seconds / timed(call, 1)))
    return timed(call, count) / count


def timed(call: Callable[[], None], count: int) -> float:
    """Milliseconds of so many calls."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


if __name__ == "__main__":
    main()
