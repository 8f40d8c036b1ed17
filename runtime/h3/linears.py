"""Which backend computes which linear of the denoiser, as the plan says (contract 1.4, 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.h3.model import Block, H3Model
from runtime.kernels.elementwise import Elementwise
from runtime.kernels.elementwise.fp8_rows import FP8Rows
from runtime.kernels.elementwise.triton import Triton
from runtime.kernels.linear import linear_backend, linear_builder
from runtime.kernels.linear.quack import QuackLinear
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan

# Of the blocks, and nothing else: fp32 islands, AdaLN, text projection, refiner and heads are never
# rounded to FP8 by a plan; a layer of those that is stored narrow is widened.
NARROW = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linears:
    """`build` makes the stored quantised layers, and of the unquantised those in `converted`."""

    build: Callable[[PackedWeight, nn.Module], nn.Module]
    converted: frozenset[str]


def choose(
    model: nn.Module,
    layers: Mapping[str, LayerQuant],
    plan: Plan,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
    *,
    cut: bool = False,
) -> Linears:
    """layers: the quantised ones of the file. dtype_of: of a layer's activations. cut: ranks share
    weights, so that every linear of the blocks is built.

    ValueError or Unavailable, before anything is read, for a backend that does not exist, does not
    run a layer's format or does not run on the device.
    """
    narrow = narrow_layers(model)
    _check_fp4(layers, narrow, plan, device)
    converted = narrow - layers.keys() if cut or plan.dense != "dense" else frozenset()
    build = linear_builder(
        named(plan),
        {**layers, **dict.fromkeys(converted, LayerQuant(format=UNQUANTISED))},
        device,
        narrow=narrow,
        cached=dtype_of if plan.weights == "cached" else None,
    )
    return Linears(build=build, converted=converted)


def _check_fp4(
    layers: Mapping[str, LayerQuant], narrow: frozenset[str], plan: Plan, device: torch.device
) -> None:
    """FP4 tensor cores give half types only, which a first step would find out after minutes."""
    if device.type != "cuda" or plan.nvfp4 != "nvfp4_native" or plan.dtype != "fp32":
        return
    for layer in sorted(narrow & layers.keys()):
        if layers[layer].format == "nvfp4" and not layers[layer].full_precision:
            raise Unavailable(
                "nvfp4_native",
                f"layer {layer} is nvfp4, whose matmul on a GPU gives no fp32, and the plan's "
                f"dtype is fp32; set dtype to bf16, or nvfp4 to nvfp4_dequant",
            )


def named(plan: Plan) -> Mapping[str, str]:
    """Stored format to the backend that the plan names for it."""
    return {
        UNQUANTISED: plan.dense,
        "nvfp4": plan.nvfp4,
        "float8_e4m3fn": plan.fp8,
        "float8_e5m2": plan.fp8,
        "int8_tensorwise": plan.int8,
    }


def narrow_layers(model: nn.Module) -> frozenset[str]:
    """The layers that a backend may round to FP8."""
    return frozenset(name for name, _ in model.named_modules() if is_narrow(name))


def is_narrow(layer: str) -> bool:
    """Is it one of them, by its name?"""
    return layer.startswith("blocks.") and layer.split(".", 2)[-1] in NARROW


def hand_over_rows(model: H3Model, ops: Elementwise) -> None:
    """Blocks whose linears all take FP8 rows get Triton's steps that end in them: the same bits.

    Other forms of the steps, and other blocks, stay as they are: the linear quantises.
    """
    if not isinstance(ops, Triton):
        return
    # The model hands what these return to a linear and to nothing else, so the type may differ.
    fused = cast(Elementwise, FP8Rows(ops))
    for block in model.blocks:
        assert isinstance(block, Block)
        linears = (block.attn.qkv_proj, block.mlp.fc1, block.mlp.fc2)
        if all(getattr(x, "takes_rows", False) for x in linears):
            block.ops = block.mlp.ops = fused


def fuse_swiglu(model: H3Model, ops: Elementwise) -> None:
    """SwiGLU goes into the product before it where that is QuACK's, with the roundings of Triton's
    step: the same bits (tests/gpu/test_quack.py), without a round trip of [S, 2 F] through memory.
    """
    if not isinstance(ops, Triton):
        return
    for block in model.blocks:
        assert isinstance(block, Block)
        if isinstance(block.mlp.fc1, QuackLinear):
            block.mlp.fc1.gated = True
            block.mlp.ops = cast(Elementwise, _Done())


class _Done:
    """Of an MLP's steps, which are one, what is left after its first linear has made it."""

    def swiglu(self, h_SF: Tensor) -> Tensor:
        return h_SF


def routes(
    model: nn.Module, layers: Mapping[str, LayerQuant], plan: Plan, device: torch.device
) -> dict[str, str]:
    """By "linear NAME": what runs, for the backends that some layer uses."""
    stored = {quant.format for quant in layers.values()}
    if narrow_layers(model) - layers.keys():
        stored.add(UNQUANTISED)
    names = dict.fromkeys(name for format, name in named(plan).items() if format in stored)
    told = {f"linear {name}": linear_backend(name).route(device) for name in names}
    if any(isinstance(getattr(block, "ops", None), FP8Rows) for block in model.modules()):
        told["fp8 rows"] = "quantised in the kernels of the norms and of SwiGLU"
    if any(isinstance(module, QuackLinear) and module.gated for module in model.modules()):
        told["swiglu"] = "in the kernel of the product before it"
    return told
