"""A small denoiser with as many heads as the real one, on any number of ranks; requests for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.checkpoints.demo import checkpoint_of
from runtime.checkpoints.file import IndexedCheckpoint
from runtime.checkpoints.layouts import (
    FP8,
    NVFP4,
    DitDims,
    Recipe,
    convrot,
    dit,
    layout,
    quantised,
)
from runtime.h3.conditioning import Conditioning, ReferenceBlock
from runtime.h3.denoise import Shifts, Side, draw_noise, sample
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.h3.packing import TargetShape
from runtime.meter import StepMeter
from runtime.parallel.mesh import Mesh
from tests.denoiser_parts import CPU, conditioning, demo_plan, normal

HEADS = 56
DIMS = DitDims(
    hidden=128,
    heads=HEADS,
    head_dim=32,
    inv_freq=4,
    ffn=1024,  # eight tiles of 128: uneven on three and six ranks
    blocks=2,
    refiner_blocks=1,
    text_dim=16,
    grid=129,
)
TARGET = TargetShape(latent_t=3, latent_h=6, latent_w=10, audio_t=9)  # 45 and 18 rows
SIGMAS = torch.tensor([1.0, 0.8, 0.4, 0.0])
_RECIPES: dict[str, Callable[[int], str]] = {
    "nvfp4": lambda columns: NVFP4,
    "fp8": lambda columns: FP8,
    "int8": convrot,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint (bf16, or blocks stored as nvfp4, fp8, int8) and plan fields.

    outlier: the factor of one reference row, whose activations dwarf all others'.
    """

    stored: str = "bf16"
    fields: dict[str, object] = field(default_factory=dict)
    outlier: float = 1.0


def checkpoint(stored: str) -> IndexedCheckpoint:
    """Random weights of DIMS; of the blocks, quantised ones."""

    def choose(layer: str, shape: tuple[int, ...]) -> Recipe | None:
        if not layer.startswith("blocks.") or "adaln_proj" in layer:
            return None
        return Recipe(marker=_RECIPES[stored](shape[1]))

    specs = dit(DIMS, pruned=True, adaln="F32")
    tensors = list(specs if stored == "bf16" else quantised(specs, choose))
    metadata = {"format": "pt"}
    return checkpoint_of(layout(tensors, metadata), "dit", size="tiny", name=f"wide/{stored}")


def model_of(case: Case, mesh: Mesh, meter: StepMeter | None = None) -> H3Model:
    """This rank's."""
    plan = demo_plan(**case.fields)
    return load_denoiser(checkpoint(case.stored), plan, CPU, meter=meter, mesh=mesh)[0]


def request(case: Case) -> Conditioning:
    """Seven text rows, a picture and a sound: with TARGET 84 rows, ragged on every rank count."""
    picture = normal(1, 24, 1, 4, 6)
    picture[0, :, 0, :2, :2] *= case.outlier
    return conditioning(
        (1, 0, 0, 1, 1, 0, 1),
        references=(
            ReferenceBlock(kind="image", latent=picture),
            ReferenceBlock(kind="audio", audio_latent=normal(1, 32, 2, 4)),
        ),
    )


def sampled(model: H3Model, case: Case) -> dict[str, Tensor]:
    """Velocities of both streams at every step, as the goldens name them."""
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        side = Side(model, request(case), TARGET, seed=7, shifts=Shifts(), device=CPU)
        sample(
            side,
            None,
            cfg=1.0,
            sampler="euler",
            sigmas=SIGMAS,
            noise=draw_noise(TARGET, 7),
            start=None,
            on_step=lambda step: None,
            tap=lambda name, value: found.update({name: value.clone()}),
        )
    return found
