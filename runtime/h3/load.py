"""Checkpoints to modules on a device: dtypes and islands as the plan says (contract 1.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from runtime.checkpoints.base import Checkpoint
from runtime.checkpoints.load import LoadReport, fill, load_into
from runtime.graphs import CudaRecorder, Graphs
from runtime.h3 import lifetime
from runtime.h3.config import H3Config
from runtime.h3.gathered import gathers, own_heads
from runtime.h3.graphed import graphed
from runtime.h3.linears import choose as choose_linears
from runtime.h3.linears import fuse_swiglu, hand_over_rows
from runtime.h3.model import FP32_ISLANDS, H3Model
from runtime.h3.offload import lender, offloaded_names
from runtime.h3.overlap import in_turns, overlaps
from runtime.h3.parallelize import share_amax, share_rows, share_weights
from runtime.kernels.attention import AttentionOptions, attention_backend, load_attention
from runtime.kernels.attention.own_v import with_own_v
from runtime.kernels.elementwise import load as load_elementwise
from runtime.layouts import Layout, check_heads, parts_of
from runtime.messages import Plan
from runtime.meter import ATTENTION, GEMM, StepMeter
from runtime.parallel.copy_engine import by_copy_engine, copies
from runtime.parallel.mesh import ALONE, Mesh

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention_options(plan: Plan) -> AttentionOptions:
    """What the plan says about attention; its `rows` belong to the model that gets them."""
    return AttentionOptions(sol_tau=plan.sol_tau, sol_sinks=plan.sol_sinks, kj_mode=plan.kj_mode)


def exchanges(plan: Plan, mesh: Mesh) -> list[str]:
    """Which of overlap, gather and transport are at work: ranks that share no rows have none."""
    asked = (
        (f"overlap {plan.overlap}", overlaps),
        (f"gather {plan.gather}", gathers),
        (f"transport {plan.transport}", copies),
    )
    return [words for words, works in asked if works(plan, mesh)]


def load_denoiser(
    checkpoint: Checkpoint,
    plan: Plan,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    meter: StepMeter | None = None,
    mesh: Mesh = ALONE,
) -> tuple[H3Model, LoadReport]:
    """The denoiser of a checkpoint, on the device, ready to run; `meter` measures its calls.

    mesh: the ranks that evaluate it together; each loads it at the same time. ValueError where the
    plan has more, and for more than the model has heads.

    Unavailable before anything is read when a backend of the plan cannot run here, CheckpointError
    when the file does not fit the model.
    """
    if mesh.everyone.size == 1 and Layout.parse(plan.layout).ranks > 1:
        raise ValueError(
            f"plan {plan.name} has layout {plan.layout}, and this runs on one rank; set layout to "
            f"single, or use generate, sweep or runtime.rank"
        )
    if meter is not None:
        mesh = mesh.timed_by(meter.transfer)
    if copies(plan, mesh):
        mesh = replace(mesh, rows=by_copy_engine(mesh.rows, device))
    cfg = H3Config.from_checkpoint(checkpoint)
    check_heads(Layout(tensor=mesh.weights.size, ulysses=mesh.rows.size), cfg.num_heads)
    later = offloaded_names(checkpoint, cfg) if plan.adaln == "offloaded" else frozenset()
    compute = DTYPES[plan.dtype]
    options = attention_options(plan)
    attend = load_attention(plan.attention, device, compute, options, head_dim=cfg.head_dim)
    if meter is not None:
        attend = meter.wrap(ATTENTION, attend)
    ops = load_elementwise(plan.elementwise, device)
    strided_v = attention_backend(plan.attention).strided_v
    attend = with_own_v(attend, strided_v=strided_v, copy=ops.copy)
    with torch.device("meta"):
        model = H3Model(cfg, attend, ops)
    model.packed_rows = options.rows
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    adaln_fp32 = cfg.pruned  # the pruned form's AdaLN is declared fp32; the full form's is not

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        del stored
        island = name.startswith(FP32_ISLANDS) or (adaln_fp32 and "adaln_proj" in name)
        return torch.float32 if island else compute

    def dtype_of_layer(layer: str) -> torch.dtype:
        return dtype_of(f"{layer}.weight", compute)

    cut = mesh.weights.size > 1
    chosen = choose_linears(
        model,
        checkpoint.layers,
        plan,
        device,
        dtype_of_layer,
        cut=cut or overlaps(plan, mesh),
    )
    if overlaps(plan, mesh):
        chosen = in_turns(model, checkpoint.layers, plan, chosen, mesh)
    if gathers(plan, mesh):
        chosen = own_heads(model, checkpoint.layers, chosen, mesh)
    if cut:
        chosen = share_weights(model, checkpoint.layers, plan, chosen, mesh, meter)
    if plan.memory == "low":
        lifetime.check(model, checkpoint.layers, plan)
        lifetime.lower(model)
    report = load_into(
        model,
        checkpoint,
        device=device,
        dtype_of=dtype_of,
        build_linear=chosen.build,
        converted=chosen.converted,
        later=later,
        progress=progress,
    )
    if later:
        read = partial(
            fill, model, checkpoint, device=device, dtype_of=dtype_of, build_linear=chosen.build
        )
        model.lend = lender(model, later, read)
    if plan.memory == "plain":  # low cuts rows up between the steps and the linears
        hand_over_rows(model, ops)
    fuse_swiglu(model, ops)
    if checkpoint.quantised and plan.island_rounding == "comfy":
        _round_islands(model, compute)
    if meter is not None:
        for name in linears:  # quantised ones have become modules of their backend
            linear = model.get_submodule(name)
            linear.forward = meter.wrap(GEMM, linear.forward)
    share_rows(model, mesh, meter, parts_of(plan.row_split))
    if plan.amax == "shared":
        share_amax(model, mesh, meter)
    if plan.graphs:
        graphed(model, Graphs(CudaRecorder(device)))
    return model.eval().requires_grad_(False), report


def _round_islands(model: nn.Module, compute: torch.dtype) -> None:
    """Round fp32 linears through the compute dtype, as any quantisation marker in the file does.

    ComfyUI's mixed-precision Linear ignores the requested fp32 and widens again later (1.4b).
    Buffers (adaln_t_table, inv_freq) are not linears and keep fp32.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(compute).to(torch.float32)
