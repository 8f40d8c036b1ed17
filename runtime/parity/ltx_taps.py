"""Hooks that capture an LTX forward under the goldens' names; every capture clones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runtime.ltx.model import LTXModel

Captured = dict[str, Tensor]

AV_ATTENTIONS = ("audio_to_video_attn", "video_to_audio_attn")
# AdaLN head -> its name in diffusers, which the goldens use
HEADS = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}


@contextmanager
def forward_taps(model: LTXModel) -> Iterator[Captured]:
    """Captures adaln.<head>.{mod,embedded}, block.N.{video,audio} and, per block, what goes into
    and comes out of both attentions between the streams."""
    captured: Captured = {}
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def pair(module: nn.Module, name: str, parts: tuple[str, str]) -> None:
        def hook(_: nn.Module, args: object, out: tuple[Tensor, Tensor]) -> None:
            for part, value in zip(parts, out, strict=True):
                captured[f"{name}.{part}"] = value.clone()

        handles.append(module.register_forward_hook(hook))

    def attention(module: nn.Module, name: str) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            for part, value in (("query_in", args[0]), ("context_in", args[1]), ("out", out)):
                captured[f"{name}.{part}"] = value.clone()

        handles.append(module.register_forward_hook(hook))

    for ours, theirs in HEADS.items():
        pair(model.get_submodule(ours), f"adaln.{theirs}", ("mod", "embedded"))
    for i, block in enumerate(model.transformer_blocks):
        for name in AV_ATTENTIONS:
            attention(block.get_submodule(name), f"block.{i}.{name}")
        pair(block, f"block.{i}", ("video", "audio"))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
