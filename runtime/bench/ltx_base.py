"""What a subject of LTX is told, what each of its two stages is made of, and its random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from runtime.bench.base import SIZES, Work, work_of
from runtime.ltx.conditioning import Conditioning
from runtime.ltx.config import LTXConfig
from runtime.ltx.demo import random_denoiser
from runtime.ltx.denoiser import stages_of
from runtime.ltx.load import LTXCheckpoint, open_denoiser
from runtime.ltx.model import Contexts
from runtime.ltx.published import FORMATS
from runtime.ltx.sizes import CONTEXT_ROWS
from runtime.messages import LTXRequest, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LTXSetup(Work):
    """Of LTX: text_rows is of contexts, and with them it is sampled alone."""

    request: LTXRequest
    known: bool  # a turn finds the conditioning of the one before; else it is encoded anew

    @property
    def kind(self) -> str:
        """Which subject runs it, of runtime.bench.__main__."""
        alone = self.subject == "plan" and self.text_rows
        return f"ltx {'sampling' if alone else self.subject}"


class Size(TypedDict):
    """Of one stage: steps, and tokens of an evaluation; it travels as JSON."""

    steps: int
    video: int
    audio: int
    text: int


def ltx_setup_of(told: Mapping[str, Any]) -> LTXSetup:
    """The setup from its JSON."""
    request = dict(told["request"])
    request["image"] = None if request["image"] is None else Path(request["image"])
    return LTXSetup(**work_of(told), request=LTXRequest(**request), known=told["known"])


def sizes(setup: LTXSetup) -> tuple[Size, ...]:
    """Of stage 1 and stage 2; a prompt's contexts have all the rows that there are."""
    return tuple(
        Size(
            steps=stage.steps,
            video=stage.shape.latent.video_tokens,
            audio=stage.shape.latent.audio,
            text=setup.text_rows or CONTEXT_ROWS,
        )
        for stage in stages_of(setup.request)
    )


def opened(plan: Plan, weights: str) -> LTXCheckpoint:
    """The plan's denoiser, or the random one of "SIZE:FORMAT", which is made on the device.

    ValueError lists the sizes and formats.
    """
    if not weights:
        return open_denoiser(plan.models.dit, plan.ltx_nvfp4_order)
    size, _, stored = weights.partition(":")
    if size not in SIZES or stored not in FORMATS:
        raise ValueError(
            f"random weights of LTX must be {' or '.join(SIZES)}, of {', '.join(FORMATS)}; got "
            f"{size} of {stored!r}"
        )
    return random_denoiser(size, stored)


def random_conditioning(
    config: LTXConfig, rows: int, seed: int, dtype: torch.dtype
) -> Conditioning:
    """Unit noise in the place of contexts, no first frame."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    contexts = Contexts(
        video_BLD=normal((1, rows, config.cross_attention_dim)).to(dtype),
        audio_BLD=normal((1, rows, config.audio_cross_attention_dim)).to(dtype),
    )
    return Conditioning(contexts=contexts)


def device_of(plan: Plan) -> torch.device:
    """ValueError where there is none."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("the plan asks for device cuda, but torch sees no CUDA device")
    return torch.device(plan.device)
