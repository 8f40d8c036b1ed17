"""Which settings a replay has, and from whom: the golden's where it fixes them, else the plan's.

A golden fixes what decided its numbers: the compute dtype, the format of its checkpoint and whether
activations are quantised. It leaves open how the same arithmetic is carried out: attention, norm
and rotation, unquantised products, device. Where plan and golden contradict each other the case is
unsupported: another backend than the plan's would say nothing about the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.base import Checkpoint
from runtime.layouts import SINGLE
from runtime.messages import FP8_BACKENDS, ModelFiles, Plan
from runtime.parity.golden import Golden
from runtime.parity.metrics import Unsupported
from runtime.parity.setup import Setup

NVFP4 = {"exact": "nvfp4_native", "fallback": "nvfp4_kitchen_fallback"}
FORMATS = {"nvfp4": "nvfp4", "fp8": "float8_e4m3fn", "int8": "int8_tensorwise"}  # field -> stored
VAE_DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16"}
VAE_KINDS = ("vae_decode", "vae_encode")
# of attention backends
OPTIONS = {
    "kj": ("kj_mode",),
    "sol": ("sol_tau", "sol_sinks"),
    "sol_nvlabs": ("sol_tau", "sol_sinks"),
}
# Their dtype, NVFP4 backend and form are told from the names of what they store (ltx_files.py)
LTX_ATTENTION = ("ltx_forward", "ltx_connectors", "ltx_sampler")

Setting = Mapping[str, str]  # field, value, from: golden | plan


def denoiser(golden: Golden, checkpoints: Path) -> Checkpoint:
    """The denoiser that an end-to-end golden names."""
    return open_checkpoint(checkpoints / f"{golden.params['dit']}.safetensors", "dit")


def plan_of(golden: Golden, checkpoint: Checkpoint, setup: Setup) -> Plan:
    """The plan that an end-to-end golden is replayed with; Unsupported names a contradiction."""
    own, plan = _own(golden, setup), setup.plan
    if plan is None:
        return own
    if plan.dtype != own.dtype:
        raise Unsupported(
            f"the golden was captured in {own.dtype} and plan {plan.name} computes in {plan.dtype}"
        )
    if plan.dense in FP8_BACKENDS:
        raise Unsupported(
            f"the golden's unquantised layers were captured as {own.dense} computes and plan "
            f"{plan.name} names {plan.dense}"
        )
    if plan.adaln == "offloaded" and "adaln_t_table" in checkpoint.names():
        raise Unsupported(
            f"the golden's checkpoint is pruned and plan {plan.name} offloads AdaLN weights, which "
            f"only a full one has"
        )
    for field in _fields(checkpoint):
        fixed, asked = getattr(own, field), getattr(plan, field)
        if fixed != asked:
            raise Unsupported(
                f"the golden's {FORMATS[field]} layers were captured as {fixed} computes and "
                f"plan {plan.name} names {asked}"
            )
    return replace(
        own,
        name=plan.name,
        dense=plan.dense,
        layout=plan.layout,
        amax=plan.amax,
        overlap=plan.overlap,
        gather=plan.gather,
        transport=plan.transport,
        row_split=plan.row_split,
        attention=plan.attention,
        kj_mode=plan.kj_mode,
        sol_tau=plan.sol_tau,
        sol_sinks=plan.sol_sinks,
        elementwise=plan.elementwise,
        island_rounding=plan.island_rounding,
        weights=plan.weights,
        adaln=plan.adaln,
        graphs=plan.graphs,
        kernel_times=plan.kernel_times,
    )


def vae_attention(golden: Golden, setup: Setup) -> str:
    """The attention of a video VAE golden; Unsupported if the plan's VAE has another dtype."""
    if setup.plan is None:
        return "sdpa"
    dtype = _vae_dtype(golden.header["vae_dtype"])
    if setup.plan.video_vae_dtype != dtype:
        raise Unsupported(
            f"the golden was captured with the video VAE in {dtype} and plan {setup.plan.name} "
            f"runs it in {setup.plan.video_vae_dtype}"
        )
    return setup.plan.vae_attention


def settings_of(golden: Golden, checkpoints: Path, setup: Setup) -> list[Setting]:
    """What the report says of a replay; empty where no setting plays a part."""
    by = "plan" if setup.plan else "golden"
    found = [_setting("device", setup.device.type, by)]
    if setup.plan and setup.plan.layout != SINGLE:
        found.append(_setting("layout", setup.plan.layout, "plan"))
    if golden.kind == "e2e":
        checkpoint = denoiser(golden, checkpoints)
        plan = plan_of(golden, checkpoint, setup)
        found += [
            _setting("dtype", plan.dtype, "golden"),
            _setting("attention", plan.attention, by),
            *_options(plan, plan.attention),
            _setting("elementwise", plan.elementwise, by),
            *(_setting(field, getattr(plan, field), "golden") for field in _fields(checkpoint)),
        ]
        if plan.dense != "dense":
            found.append(_setting("dense", plan.dense, "plan"))
        if checkpoint.quantised:
            found.append(_setting("island_rounding", plan.island_rounding, by))
        dtype = _vae_dtype(golden.header["vae_dtype"]["video"])
        found.append(_setting("video_vae", f"{dtype}, sdpa", "golden"))
    if golden.kind == "capture" and setup.plan:
        fields = (
            "dtype",
            "attention",
            "vae_attention",
            "elementwise",
            "island_rounding",
            "dense",
            *FORMATS,
            "video_vae_dtype",
        )
        found += [_setting(field, getattr(setup.plan, field), "plan") for field in fields]
        found += _options(setup.plan, setup.plan.attention, setup.plan.vae_attention)
    if golden.kind in LTX_ATTENTION:
        attention = setup.plan.attention if setup.plan else "sdpa"
        found.append(_setting("attention", attention, by))
    if golden.kind in VAE_KINDS:
        attention = vae_attention(golden, setup)
        found.append(_setting("vae_attention", attention, by))
        found += _options(setup.plan, attention) if setup.plan else []
        dtype = _vae_dtype(golden.header["vae_dtype"])
        found.append(_setting("video_vae_dtype", dtype, "golden"))
    return found


def _options(plan: Plan, *attention: str) -> list[Setting]:
    """What a plan says to these backends beside their names: another mode is another kernel."""
    names = dict.fromkeys(option for name in attention for option in OPTIONS.get(name, ()))
    return [_setting(name, str(getattr(plan, name)), "plan") for name in names]


def _own(golden: Golden, setup: Setup) -> Plan:
    """What the capture's hardware answered: compute dtype, native or emulated."""
    params = golden.params
    native = bool(params.get("native_quant", False))
    if native and params.get("gemm", "exact") not in NVFP4:
        raise Unsupported(f"gemm {params['gemm']!r}")
    return Plan(
        name="as captured",
        models=ModelFiles(dit=Path(), text_encoder=Path(), video_vae=Path(), audio_vae=Path()),
        device=setup.device.type,
        dtype=params["compute"],
        nvfp4=NVFP4[params.get("gemm", "exact")] if native else "nvfp4_dequant",
        fp8="fp8_native" if native else "fp8_dequant",
    )


def _fields(checkpoint: Checkpoint) -> list[str]:
    """The plan's fields that decide how this checkpoint's layers are computed."""
    stored = {quant.format for quant in checkpoint.layers.values() if not quant.full_precision}
    return [field for field, name in FORMATS.items() if name in stored]


def _vae_dtype(dtype: str) -> str:
    if dtype not in VAE_DTYPES:
        raise Unsupported(f"video VAE dtype {dtype}")
    return VAE_DTYPES[dtype]


def _setting(field: str, value: str, origin: str) -> Setting:
    return {"field": field, "value": value, "from": origin}
