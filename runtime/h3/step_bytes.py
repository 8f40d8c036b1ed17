"""What the ranks of a plan move in a denoising step of a request, as runtime/parallel/volume.py."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.h3.config import PATCH, H3Config
from runtime.h3.packing import PackedLayout, TargetShape
from runtime.layouts import Layout, parts_of
from runtime.messages import Plan
from runtime.parallel.volume import Moved, Shape, of_a_step

_VALUE_BYTES = {"bf16": 2, "fp32": 4}
_STEREO = 2


def step_bytes(
    cfg: H3Config, plan: Plan, sides: Sequence[PackedLayout], target: TargetShape
) -> tuple[Moved, ...]:
    """Of each rank; one rank alone moves nothing. sides: the positive one first."""
    values = {"video": cfg.video_channels * PATCH**2, "audio": cfg.audio_channels}
    shapes = [
        Shape(
            rows=side.num_rows,
            targets=tuple((s.start, s.stop, values[s.kind]) for s in side.segments[-2:]),
            heads=cfg.num_heads,
            head_dim=cfg.head_dim,
            hidden=cfg.hidden,
            blocks=cfg.num_layers,
            value_bytes=_VALUE_BYTES[plan.dtype],
            gathered=plan.gather == "packed_nvfp4",
            split=parts_of(plan.row_split),
        )
        for side in sides
    ]
    video = cfg.video_channels * target.latent_t * target.latent_h * target.latent_w
    audio = cfg.audio_channels * _STEREO * target.audio_t
    return of_a_step(Layout.parse(plan.layout), shapes, video + audio)
