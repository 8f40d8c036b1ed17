"""Times of the block's linears on a GPU: `python -m tests.gpu.linear_times`, last line JSON.

S rows of bf16 activations and random weights of H3's four shapes. Each figure is a median over
calls timed by GPU events, with the least and the most, in milliseconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.kernels.elementwise import load
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.dense import widened
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.fp8_dynamic import FP8DynamicLinear, quantise_rows, quantise_tensor
from runtime.kernels.linear.nvfp4_native import activation_scale, quantise
from runtime.kernels.linear.quack import QuackLinear
from runtime.machine import driver

LAYERS = {
    "qkv": (5376, 21504),
    "out": (7168, 5376),
    "fc1": (5376, 28672),
    "fc2": (14336, 5376),
}  # K, N
EAGER = {"fp8_rowwise": quantise_rows, "fp8_tensorwise": quantise_tensor}
Calls = dict[str, Callable[[], object]]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_094)
    parser.add_argument("--calls", type=int, default=15)
    args = parser.parse_args()
    device = torch.device("cuda")
    found: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode():
        for name, (width, features) in LAYERS.items():
            torch.manual_seed(0)
            x = torch.randn(args.rows, width, device=device).to(torch.bfloat16)
            weight = (torch.randn(features, width, device=device) * 0.02).to(torch.bfloat16)
            found[name] = {}
            for what, call in calls(x, weight, fused=name == "fc1").items():
                found[name][what] = times(call, args.calls)
                median, least, most = found[name][what]
                print(f"{name:4s} {what:34s} {median:8.3f} ms  ({least:.3f} to {most:.3f})")
    layer = {what: sum(of[what][0] for of in found.values()) for what in found["qkv"]}
    for what, total in layer.items():
        print(f"sum  {what:34s} {total:8.3f} ms a layer, {50 * total / 1000:.3f} s of 50")
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "triton", "comfy-kitchen")
    }
    print(
        json.dumps(
            {
                "rows": args.rows,
                "calls": args.calls,
                "device": torch.cuda.get_device_name(device),
                "driver": driver(),
                "cuda": torch.version.cuda,
                "versions": versions,
                "ms_median_least_most": found,
                "ms_a_layer": layer,
            }
        )
    )


def calls(x: Tensor, weight: Tensor, *, fused: bool) -> Calls:
    """What is timed, by name; whole linears, and their parts. fused: SwiGLU as well."""
    packed = layer(weight)
    made: Calls = {"dense": partial(F.linear, x, weight)}
    for name, eager in EAGER.items():
        module = linear_backend(name).build(packed)
        assert isinstance(module, FP8DynamicLinear)
        made[name] = partial(module, x)
        made[f"{name} product"] = partial(module.multiply, module.quantise(x), torch.bfloat16)
        made[f"{name} quantise, Triton"] = partial(module.quantise, x)
        made[f"{name} quantise, torch"] = partial(eager, x)
    if not linear_backend("quack").reason(x.device):
        product, gated = (linear_backend("quack").build(packed) for _ in range(2))
        made["quack"] = partial(product, x)
        if fused:
            swiglu = load("triton", x.device).swiglu
            assert isinstance(gated, QuackLinear)
            gated.gated = True
            made["dense, SwiGLU of triton"] = lambda: swiglu(F.linear(x, weight))
            made["quack with SwiGLU"] = partial(gated, x)
    four = nvfp4(weight)
    at_use = linear_backend("nvfp4_dequant").build(four)
    kept = widened(four, torch.bfloat16)
    made["nvfp4 widen"] = partial(dequantise, four, torch.bfloat16)
    made["nvfp4_dequant, packed"] = partial(at_use, x)
    made["nvfp4_dequant, cached"] = partial(kept, x)
    return made


def layer(weight: Tensor) -> PackedWeight:
    """An unquantised layer."""
    rows, columns = weight.shape
    quant = LayerQuant(format=UNQUANTISED)
    return PackedWeight(layer="x", quant=quant, shape=(rows, columns), tensors={"weight": weight})


def nvfp4(weight: Tensor) -> PackedWeight:
    """The same weight in NVFP4."""
    rows, columns = weight.shape
    scale = activation_scale(weight, None)
    codes, blocks = quantise(weight, scale)
    return PackedWeight(
        layer="x",
        quant=LayerQuant(format="nvfp4"),
        shape=(rows, columns),
        tensors={"weight": codes, "weight_scale": blocks, "weight_scale_2": scale},
    )


def times(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds: median, least, most; three calls warm up."""
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    measured = [begin.elapsed_time(end) for begin, end in pairs]
    return [statistics.median(measured), min(measured), max(measured)]


if __name__ == "__main__":
    main()
