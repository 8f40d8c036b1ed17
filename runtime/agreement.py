"""Every rank runs with the same settings, or none runs: fingerprints by name, compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from runtime.messages import ModelFiles, Plan, Ref2VARequest
from runtime.team import Team


def fingerprints(plan: Plan, request: Ref2VARequest, sigmas: Tensor) -> dict[str, str]:
    """Of every field of plan and request, the schedule, and torch's own switches of rounding.

    The id, the prompt and the references are left out: rank 0 encodes them for all. A checkpoint
    counts by its name and size: hosts mount it in different places.
    """
    told = {f"plan field {f.name}": getattr(plan, f.name) for f in fields(Plan)}
    told["plan field models"] = _files(plan.models)
    for f in fields(Ref2VARequest):
        if f.name not in ("id", "prompt", "negative_prompt", "references"):
            told[f"request field {f.name}"] = getattr(request, f.name)
    told["sigmas"] = sigmas.tolist()
    told |= {f"torch switch {name}": value for name, value in _switches().items()}
    return {name: _hash(value) for name, value in told.items()}


def agree(team: Team, told: Mapping[str, str]) -> None:
    """ValueError on every rank, naming the first setting and the rank that differ from rank 0."""
    first, *others = team.collect(dict(told))
    for rank, other in enumerate(others, start=1):
        for name in first:
            if other.get(name) != first[name]:
                raise ValueError(
                    f"{name} of rank {rank} is not that of rank 0; start all ranks with the same "
                    f"plan, request and versions"
                )


def _files(models: ModelFiles) -> list[object]:
    files = (models.dit, models.text_encoder, models.video_vae, models.audio_vae)
    sizes = [(f.name, f.stat().st_size if f.is_file() else 0) for f in files]
    return [sizes, models.deepstack_layers]


def _switches() -> dict[str, object]:
    matmul = torch.backends.cuda.matmul
    return {
        "version": str(torch.__version__),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "bf16 reduced precision reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16 reduced precision reduction": matmul.allow_fp16_reduced_precision_reduction,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
