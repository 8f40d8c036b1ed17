"""Small denoisers and conditionings for tests: random tiny weights, random latents."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.conditioning import Conditioning, Keyframe, ReferenceBlock
from runtime.h3.denoise import Shifts, Side
from runtime.h3.load import load_denoiser
from runtime.h3.model import H3Model
from runtime.h3.packing import TargetShape
from runtime.h3.text import TextContext
from runtime.messages import ModelFiles, Plan

CPU = torch.device("cpu")
TARGET = TargetShape(latent_t=2, latent_h=4, latent_w=6, audio_t=8)
_DEMO = Path(__file__).parents[1] / "presets" / "demo"
FILES = ModelFiles(
    dit=_DEMO / "h3_tiny_pruned_bf16.safetensors",
    text_encoder=_DEMO / "qwen3vl_tiny_bf16.safetensors",
    video_vae=_DEMO / "h3_tiny_video_vae_fp16.safetensors",
    audio_vae=_DEMO / "h3_tiny_audio_vae_fp32.safetensors",
    deepstack_layers=(0, 1, 2),
)


def demo_plan(**fields: object) -> Plan:
    """A CPU plan over the demo files."""
    base = {"name": "test", "models": FILES, "device": "cpu", "dtype": "fp32"}
    return Plan(**(base | {"video_vae_dtype": "fp32"} | fields))  # type: ignore[arg-type]


def denoiser(format: str = "pruned_bf16", **fields: object) -> H3Model:
    """A tiny denoiser with random weights of that checkpoint format."""
    checkpoint = random_checkpoint("dit", size="tiny", format=format)
    model, _ = load_denoiser(checkpoint, demo_plan(**fields), CPU)
    return model


def first_block(model: H3Model, x_SD: Tensor) -> Tensor:
    """What its first block makes of bf16 rows [77, D], with the same random tables each time.

    On the device of x. D and the rotary table are those of the demo models.
    """
    made = torch.Generator(x_SD.device).manual_seed(3)
    tables = [
        torch.randn(12, x_SD.shape[1], device=x_SD.device, generator=made) * 0.3 for _ in range(6)
    ]
    rope = torch.eye(2, device=x_SD.device).expand(1, len(x_SD), 1, 48, 2, 2).to(x_SD.dtype)
    with torch.inference_mode():
        done: Tensor = model.blocks[0](
            x_SD.clone(), tables, ((0, 30, 1), (30, 77, 4)), rope.contiguous()
        )
    return done


def normal(*shape: int) -> Tensor:
    """Standard normal numbers, the same for one shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def conditioning(
    tags: tuple[int, ...] = (1, 1, 1, 1),
    references: tuple[ReferenceBlock, ...] = (),
    keyframes: tuple[Keyframe, ...] = (),
    text_dim: int = 16,
) -> Conditioning:
    """Random text states with these AdaLN tags, and the given latents."""
    context = TextContext(
        context=normal(1, len(tags), text_dim), token_tags=torch.tensor(tags), tokens=()
    )
    return Conditioning(context=context, references=references, keyframes=keyframes)


def side(
    model: H3Model,
    built: Conditioning | None = None,
    *,
    target: TargetShape = TARGET,
    seed: int = 7,
    shifts: Shifts | None = None,
) -> Side:
    """One velocity field over TARGET."""
    return Side(
        model,
        built or conditioning(),
        target,
        seed=seed,
        shifts=shifts or Shifts(),
        device=CPU,
    )
