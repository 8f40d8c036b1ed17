"""The references of a run as a golden holds them: 8-bit frames, float waves, counted from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import copy

IMAGES, VIDEOS, AUDIOS = 9, 3, 3


def stored(media: Mapping[str, Any]) -> dict[str, Tensor]:
    """The references as the replay reads them: 8-bit frames, float waves."""
    found: dict[str, Tensor] = {}
    for name, value in media.items():
        if isinstance(value, Mapping):
            found[f"in/{name}"] = copy(value["waveform"]).float()
            continue
        scaled = copy(value)[..., :3].float() * 255  # ComfyUI takes no alpha either
        frames = scaled.round()
        if bool(((scaled - frames).abs() > 1e-3).any()):
            raise RuntimeError(
                f"H3 golden: {name} holds values between 8-bit steps (it was resized or graded in "
                "the graph); connect the picture as it was loaded, or leave it out"
            )
        found[f"in/{name}"] = frames.to(torch.uint8)
    return found


def described(media: Mapping[str, Any]) -> dict[str, Any]:
    """Which references there are, as the replay counts them; waves with their rate."""
    params: dict[str, Any] = {"ref_images": [], "ref_videos": [], "ref_audios": []}
    for name, value in sorted(media.items()):
        if name.startswith("ref_image_"):
            params["ref_images"].append(list(value.shape[1:3]))
        elif name.startswith("ref_audio_"):
            params["ref_audios"].append(_wave(value))
        elif not name.startswith("ref_video_audio_"):
            sound = media.get(name.replace("ref_video_", "ref_video_audio_"))
            spec: dict[str, Any] = {"shape": list(value.shape[:3])}
            params["ref_videos"].append(spec | ({"audio": _wave(sound)} if sound else {}))
    return {name: specs for name, specs in params.items() if specs}


def _wave(audio: Mapping[str, Any]) -> dict[str, int]:
    return {
        "channels": int(audio["waveform"].shape[1]),
        "samples": int(audio["waveform"].shape[2]),
        "sr": int(audio["sample_rate"]),
    }


def numbered(media: Mapping[str, Any]) -> dict[str, Any]:
    """The connected ones, counted from 0 without gaps, as the replay reads them.

    A soundtrack keeps its video, and is dropped without one, as the H3 node does.
    """
    found: dict[str, Any] = {}
    for kind, count in (("ref_image_", IMAGES), ("ref_video_", VIDEOS), ("ref_audio_", AUDIOS)):
        there = [i for i in range(count) if media.get(f"{kind}{i}") is not None]
        for new, old in enumerate(there):
            found[f"{kind}{new}"] = media[f"{kind}{old}"]
            sound = media.get(f"ref_video_audio_{old}") if kind == "ref_video_" else None
            if sound is not None:
                found[f"ref_video_audio_{new}"] = sound
    return found


def wanted(references: Sequence[Mapping[str, Any]]) -> int:
    """How many media inputs the encoded references came from; a sounding video has two."""
    return sum(2 if block.get("kind") == "video_audio" else 1 for block in references)
