"""Replay of `layout` goldens: positions, row counts, rope angles, size tables, noise."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.h3.denoise import draw_noise
from runtime.h3.packing import (
    AUDIO_KINDS,
    VIDEO_KINDS,
    BlockShape,
    KeyframeShape,
    PackedLayout,
    TargetShape,
    pack,
)
from runtime.h3.sizes import adapted_canvas, audio_latents_of_frames, latent_frames
from runtime.messages import frame_count
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, compare
from runtime.parity.setup import Setup

LATENT = 16


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """No weights needed: pure arithmetic at real sizes."""
    del checkpoints, setup
    out: list[Comparison] = []
    for i, (spec, want) in enumerate(
        zip(golden.params["layouts"], golden.header["layouts"], strict=True)
    ):
        out += _layout(golden, i, spec, want)
    for i, stored in enumerate(golden.header["noise"]):
        out += _noise(golden, i, stored)
    for length, want in golden.header["temporal_shape"].items():
        frames = frame_count(int(length))
        got = [frames, latent_frames(frames), audio_latents_of_frames(frames)]
        out.append(_numbers(f"temporal_shape/{length}", got, want))
    for width, height, *want in golden.header["adapt_canvas"]:
        got = list(adapted_canvas(width, height))
        out.append(_numbers(f"adapt_canvas/{width}x{height}", got, want))
    return out


def _layout(
    golden: Golden, index: int, spec: dict[str, Any], want: dict[str, Any]
) -> list[Comparison]:
    frames = frame_count(spec["length"])
    target = TargetShape(
        latent_t=latent_frames(frames),
        latent_h=spec["h"] // LATENT,
        latent_w=spec["w"] // LATENT,
        audio_t=audio_latents_of_frames(frames),
    )
    layout = pack(
        text_len=spec["text_len"],
        target=target,
        references=[
            BlockShape(
                kind=ref["kind"],
                latent_t=ref.get("latent_t", 1),
                latent_h=ref.get("latent_h", 0),
                latent_w=ref.get("latent_w", 0),
                audio_t=ref.get("ref_audio_t", 0),
            )
            for ref in spec.get("refs", [])
        ],
        keyframes=[
            KeyframeShape(
                frame_index=k["frame"], latent_t=k.get("t", 0), audio_t=k.get("audio_t", 0)
            )
            for k in spec.get("keyframes", [])
        ],
    )
    prefix = f"layout_{index}"
    positions = torch.from_numpy(layout.positions_S3)
    digest = hashlib.sha256(np.ascontiguousarray(layout.positions_S3).tobytes()).hexdigest()
    segments = [[s.start, s.stop, s.kind] for s in layout.segments]
    found = {f"{prefix}/img_update_counts": _counts(layout)}
    if f"{prefix}/rows" in golden:
        rows = golden.tensor(f"{prefix}/rows")
        found[f"{prefix}/position_ids"] = positions[rows]
        found[f"{prefix}/rope_angles_every_7th"] = _angles(positions[rows][::7])
    return [
        *(_compare(golden, name, value) for name, value in found.items()),
        _equal(f"{prefix}/position_ids_sha256", digest == want["position_ids_sha256"]),
        _equal(f"{prefix}/segments", segments == want["segments"]),
        _numbers(f"{prefix}/seq_len", [layout.num_rows], [want["seq_len"]]),
    ]


def _counts(layout: PackedLayout) -> Tensor:
    counts = []
    for kinds in (VIDEO_KINDS, AUDIO_KINDS):
        targets = layout.is_target(kinds)
        counts += [int((~targets).sum()), int(targets.sum())]
    return torch.tensor(counts)


def _angles(positions_S3: Tensor) -> Tensor:
    inv_freq = 1.0 / (10000 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32))
    return (positions_S3.float()[:, :, None] * inv_freq).flatten(1)


def _noise(golden: Golden, index: int, stored: dict[str, Any]) -> list[Comparison]:
    _, _, frames, height, width = stored["video_shape"]
    target = TargetShape(
        latent_t=frames, latent_h=height, latent_w=width, audio_t=stored["audio_shape"][-1]
    )
    noise = draw_noise(target, stored["seed"])
    video, audio = noise.video.flatten(), noise.audio.flatten()
    out = [
        _compare(golden, f"noise_{index}/video_head", video[:256]),
        _compare(golden, f"noise_{index}/video_tail", video[-64:]),
        _compare(golden, f"noise_{index}/audio_head", audio[:256]),
    ]
    for name, values in (("video", video), ("audio", audio)):
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        out.append(_equal(f"noise_{index}/{name}_sha256", digest == stored[f"{name}_sha256"]))
    return out


def _compare(golden: Golden, name: str, got: Tensor) -> Comparison:
    return compare(name, got, golden.tensor(name), run="free", stage=name.split("/")[0])


def _numbers(name: str, got: list[int], want: list[int]) -> Comparison:
    return compare(name, torch.tensor(got), torch.tensor(want), run="free", stage="tables")


def _equal(name: str, equal: bool) -> Comparison:
    return _numbers(name, [int(equal)], [1])
