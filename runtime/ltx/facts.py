"""What a record says of an LTX run: versions and routes, licence, and what the file lacks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping

import torch

from runtime.checkpoints.header import RANDOM_WEIGHTS
from runtime.kernels.attention import AttentionOptions, attention_backend
from runtime.kernels.linear import linear_backend
from runtime.ltx.census import Census
from runtime.ltx.load import LTXCheckpoint
from runtime.machine import driver
from runtime.messages import Plan

MISSING = "missing in the header"
_SHOWN = 200  # characters of a license: it may be the whole text


def resolve(plan: Plan, checkpoint: LTXCheckpoint, device: torch.device) -> dict[str, str]:
    """The plan as it will really run, and what its denoiser says of itself."""
    census, on_gpu = checkpoint.census, device.type == "cuda"
    told = {
        "torch": str(torch.__version__),  # its own type would load torch where it is unpickled
        **{name: _version(name) for name in ("comfy-kitchen", "diffusers", "transformers")},
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "cuda": str(torch.version.cuda),
        "driver": (driver() or "not reported") if on_gpu else "none",
        "threads": str(torch.get_num_threads()),
        "dtype": plan.dtype,
        "weights": plan.weights,
        "video VAE dtype": plan.video_vae_dtype,
        "model version": census.version,
        "license": licence(census),
        "keyframes embedding": "present" if census.keyframes else "absent, counted as zeros",
        "nvfp4 markers": census.markers,
        "nvfp4 order": checkpoint.order if census.index.layers else "no NVFP4 layers",
        "v2a source": plan.v2a_source,
        "rope seconds": plan.ltx_rope_seconds,
        "adaln tables": plan.ltx_tables,
        "rounding": plan.ltx_rounding,
        "attention": attention_backend(plan.attention).route(device, AttentionOptions()),
    }
    if census.index.layers:
        told[f"linear {plan.nvfp4}"] = linear_backend(plan.nvfp4).route(device)
    return told


def record_notes(census: Census, version_note: str) -> Iterator[tuple[str, bool]]:
    """(sentence, is it a warning) of what every run with this denoiser has to say."""
    yield f"LTX {census.version}, license of the weights: {licence(census)}", False
    if not census.keyframes:
        text = "the denoiser has no keyframes_abs_pos_embedding; it counts as zeros"
        yield text, False
    if version_note:
        yield version_note, True
    if not is_random(census):
        yield "nobody who made this program has run the published LTX-2.5 weights", True


def provenance(census: Census) -> Mapping[str, str]:
    """Tags of every mp4 (ltx25.md 8): generated content says so."""
    model = f"LTX-{'.'.join(census.version.split('.')[:2])}"
    shown = f"{model} with random weights" if is_random(census) else model
    return {
        "comment": f"AI-generated, model {shown}",
        "ai_generated": "true",
        "model": shown,
        "model_license": licence(census),
    }


def licence(census: Census) -> str:
    """What the header says, cut; the whole text may stand there."""
    return MISSING if census.license is None else census.license[:_SHOWN]


def is_random(census: Census) -> bool:
    """Written by make-demo, or made by a benchmark."""
    return census.license == RANDOM_WEIGHTS


def _version(package: str) -> str:
    """The denoiser alone needs neither diffusers nor transformers."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
