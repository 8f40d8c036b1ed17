"""Sizes, tokens, positions and rotation tables of LTX, against diffusers' tables to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from torch import Tensor

from runtime.ltx.packing import (
    RopeTables,
    Rotation,
    audio_latent,
    audio_positions,
    audio_tokens,
    keyframe_mask,
    rope_tables,
    video_latent,
    video_positions,
    video_tokens,
)
from runtime.ltx.sizes import LatentShape, LTXShape
from tests.ltx_parts import tiny_config

SHAPE = LatentShape(frames=3, height=2, width=4, audio=9)


# ---- sizes


def test_the_published_examples_have_their_tokens() -> None:
    """121 frames at 24 fps (ltx25.md section 2)."""
    sizes = {(768, 512): 6144, (1536, 1024): 24576, (1920, 1088): 32640}
    for (width, height), tokens in sizes.items():
        latent = LTXShape(frames=121, height=height, width=width, fps=24.0).latent
        assert (latent.video_tokens, latent.audio) == (tokens, 126)


def test_the_first_stage_has_half_the_sides_and_the_same_times() -> None:
    whole = LTXShape(frames=17, height=128, width=192, fps=25.0)
    assert (whole.half.height, whole.half.width) == (64, 96)
    assert whole.half.latent.audio == whole.latent.audio
    with pytest.raises(ValueError, match="width must be a multiple of 64 for two stages, got 96"):
        _ = LTXShape(frames=17, height=128, width=96, fps=25.0).half


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"frames": 120}, r"frames must be 8k\+1 \(as 121\), got 120"),
        ({"frames": 0}, r"frames must be 8k\+1"),
        ({"height": 48}, "height must be a multiple of 32, got 48"),
        ({"width": 0}, "width must be a multiple of 32, got 0"),
        ({"fps": 0.0}, "fps must be above 0, got 0.0"),
        ({"frames": 1, "fps": 60.0}, "too short for one audio latent"),
    ],
)
def test_a_size_without_latents_is_refused(changes: dict[str, Any], said: str) -> None:
    sizes: dict[str, Any] = {"frames": 9, "height": 64, "width": 64, "fps": 24.0}
    with pytest.raises(ValueError, match=said):
        LTXShape(**sizes | changes)


# ---- tokens


def test_video_tokens_go_by_frame_row_column_and_back() -> None:
    latent = torch.randn(2, 5, 3, 2, 4)
    tokens = video_tokens(latent)
    assert tokens.shape == (2, 24, 5)
    assert torch.equal(tokens[1, 1 * 8 + 1 * 4 + 2], latent[1, :, 1, 1, 2])
    assert torch.equal(video_latent(tokens, SHAPE), latent)


def test_audio_tokens_hold_channels_before_bins() -> None:
    latent = torch.randn(2, 8, 9, 16)
    tokens = audio_tokens(latent)
    assert tokens.shape == (2, 9, 128)
    assert torch.equal(tokens[1, 4, 3 * 16 + 5], latent[1, 3, 4, 5])
    assert torch.equal(audio_latent(tokens), latent)


def test_the_first_latent_frame_alone_is_a_keyframe() -> None:
    assert keyframe_mask(SHAPE)[0, :, 0].tolist() == [1.0] * 8 + [0.0] * 16


# ---- positions


def test_the_first_latents_cover_one_frame_of_video_and_one_of_mel() -> None:
    seconds, rows, columns = video_positions(SHAPE, 8.0)
    assert seconds.tolist() == [[0.0, 0.125], [0.125, 1.125], [1.125, 2.125]]
    assert rows.tolist() == [[0, 32], [32, 64]] and columns[-1].tolist() == [96, 128]
    assert torch.allclose(audio_positions(3), torch.tensor([[0, 0.01], [0.01, 0.05], [0.05, 0.09]]))


def test_another_word_for_the_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds must be one of divide, multiply, got 'times'"):
        video_positions(SHAPE, 24.0, seconds="times")  # type: ignore[arg-type]


# ---- rotation tables


def theirs(name: str, fps: float, *, multiply: bool = False) -> Rotation:
    """diffusers' table; `multiply`: with seconds as ComfyUI forms them."""
    modality = "audio" if "audio" in name else "video"
    dim, heads = (32, 2) if name == "video" else (16, 2)
    rope = LTX2AudioVideoRotaryPosEmbed(
        dim=dim,
        modality=modality,
        scale_factors=(4,) if modality == "audio" else (8, 32, 32),
        rope_type="split",
        num_attention_heads=heads,
    )
    coords: Tensor
    if modality == "audio":
        coords = rope.prepare_audio_coords(1, SHAPE.audio, torch.device("cpu"))
    else:
        coords = rope.prepare_video_coords(
            1, SHAPE.frames, SHAPE.height, SHAPE.width, torch.device("cpu"), fps=1.0
        )
        coords[:, 0] = coords[:, 0] * (1.0 / fps) if multiply else coords[:, 0] / fps
    cos, sin = rope(coords[:, :1] if "cross" in name else coords)
    return Rotation(cos_BHTr=cos, sin_BHTr=sin)


@pytest.mark.parametrize("fps", [24.0, 25.0, 30.0, 23.976])
@pytest.mark.parametrize("name", ["video", "audio", "video_cross", "audio_cross"])
def test_every_table_has_the_bits_of_diffusers(name: str, fps: float) -> None:
    for multiply in (False, True):
        tables = rope_tables(
            tiny_config(), SHAPE, fps, seconds="multiply" if multiply else "divide"
        )
        got, want = getattr(tables, name), theirs(name, fps, multiply=multiply)
        assert torch.equal(got.cos_BHTr, want.cos_BHTr)
        assert torch.equal(got.sin_BHTr, want.sin_BHTr)


def test_the_two_ways_to_seconds_differ_where_the_frequency_is_high() -> None:
    shape = LatentShape(frames=16, height=1, width=1, audio=4)

    def tables(seconds: Any) -> RopeTables:
        return rope_tables(tiny_config(), shape, 24.0, seconds=seconds)

    divided, multiplied = tables("divide"), tables("multiply")
    off = (divided.video.cos_BHTr - multiplied.video.cos_BHTr).abs().max()
    assert 1e-5 < off < 1.5e-3
    assert torch.equal(divided.audio.cos_BHTr, multiplied.audio.cos_BHTr)


def test_missing_angles_are_zeros_in_front_and_belong_to_the_first_head() -> None:
    """Video: 16 angles a token, 3 axes of 5; the one that is missing turns nothing."""
    tables = rope_tables(tiny_config(), SHAPE, 24.0)
    first = tables.video.cos_BHTr[0, 0, :, 0], tables.video.sin_BHTr[0, 0, :, 0]
    assert torch.equal(first[0], torch.ones(24)) and torch.equal(first[1], torch.zeros(24))
    assert tables.video.sin_BHTr[0, 1, :, 0].abs().min() > 0


def test_tables_are_rounded_to_the_dtype_they_are_asked_for() -> None:
    half = rope_tables(tiny_config(), SHAPE, 24.0, dtype=torch.bfloat16)
    full = rope_tables(tiny_config(), SHAPE, 24.0)
    assert torch.equal(half.video.cos_BHTr, full.video.cos_BHTr.bfloat16())
    assert torch.equal(half.audio_cross.sin_BHTr, full.audio_cross.sin_BHTr.bfloat16())
