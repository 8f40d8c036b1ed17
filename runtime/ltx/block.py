"""One layer of the LTX denoiser: both streams, their text, and the attentions between them.

B batch, N video tokens, A audio tokens, T tokens of either, L text rows, D width of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from runtime.kernels.attention.base import Attend
from runtime.ltx.config import AV_ROWS, BLOCK_ROWS, PROMPT_ROWS, LTXConfig
from runtime.ltx.forms import Form
from runtime.ltx.layers import Attention, FeedForward, gated_sum, modulated, rms
from runtime.ltx.modulation import StreamModulation
from runtime.ltx.packing import RopeTables, Rotation

V2ASource = Literal["pre_a2v", "post_a2v"]
V2A_SOURCES: tuple[V2ASource, ...] = ("pre_a2v", "post_a2v")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """The text of both streams, from the connectors: [B, L, D] each, no mask."""

    video_BLD: Tensor
    audio_BLD: Tensor


class Block(nn.Module):
    """One layer of both streams (section 3.2); every norm in it is without weight."""

    def __init__(self, config: LTXConfig, attend: Attend, form: Form) -> None:
        super().__init__()
        video, audio = config.video_dim, config.audio_dim
        heads = (config.num_attention_heads, config.attention_head_dim)
        audio_heads = (config.audio_num_attention_heads, config.audio_attention_head_dim)
        text, audio_text = config.cross_attention_dim, config.audio_cross_attention_dim
        self.eps, self.form = config.norm_eps, form
        make = partial(Attention, attend=attend, form=form)
        self.attn1 = make(video, video, *heads)
        self.attn2 = make(video, text, *heads)
        self.audio_attn1 = make(audio, audio, *audio_heads)
        self.audio_attn2 = make(audio, audio_text, *audio_heads)
        self.audio_to_video_attn = make(video, audio, *audio_heads)
        self.video_to_audio_attn = make(audio, video, *audio_heads)
        self.ff = FeedForward(video, config.video_ff_dim, bias=config.ff_bias)
        self.audio_ff = FeedForward(audio, config.audio_ff_dim, bias=config.audio_ff_bias)
        self.scale_shift_table = empty_table(BLOCK_ROWS, video)
        self.audio_scale_shift_table = empty_table(BLOCK_ROWS, audio)
        self.prompt_scale_shift_table = empty_table(PROMPT_ROWS, video)
        self.audio_prompt_scale_shift_table = empty_table(PROMPT_ROWS, audio)
        self.scale_shift_table_a2v_ca_video = empty_table(AV_ROWS, video)
        self.scale_shift_table_a2v_ca_audio = empty_table(AV_ROWS, audio)

    def forward(
        self,
        x_BND: Tensor,
        y_BAD: Tensor,
        contexts: Contexts,
        video: StreamModulation,
        audio: StreamModulation,
        rope: RopeTables,
        v2a_source: V2ASource,
    ) -> tuple[Tensor, Tensor]:
        rows = video.block.with_table(self.scale_shift_table)
        audio_rows = audio.block.with_table(self.audio_scale_shift_table)
        x_BND = self._self_and_text(
            x_BND,
            contexts.video_BLD,
            rows,
            video.prompt.with_table(self.prompt_scale_shift_table),
            rope.video,
            (self.attn1, self.attn2),
        )
        y_BAD = self._self_and_text(
            y_BAD,
            contexts.audio_BLD,
            audio_rows,
            audio.prompt.with_table(self.audio_prompt_scale_shift_table),
            rope.audio,
            (self.audio_attn1, self.audio_attn2),
        )
        x_BND, y_BAD = self._across(x_BND, y_BAD, video, audio, rope, v2a_source)
        x = self.ff(modulated(rms(x_BND, self.eps), *rows[3:5]))
        y = self.audio_ff(modulated(rms(y_BAD, self.eps), *audio_rows[3:5]))
        return (
            gated_sum(x_BND, x, rows[5], self.form),
            gated_sum(y_BAD, y, audio_rows[5], self.form),
        )

    def _self_and_text(
        self,
        x_BTD: Tensor,
        context_BLD: Tensor,
        rows: tuple[Tensor, ...],
        prompt: tuple[Tensor, ...],
        rope: Rotation,
        attentions: tuple[Attention, Attention],
    ) -> Tensor:
        to_self, to_text = attentions
        h = modulated(rms(x_BTD, self.eps), rows[0], rows[1])
        x_BTD = gated_sum(x_BTD, to_self(h, h, rope), rows[2], self.form)
        h = modulated(rms(x_BTD, self.eps), rows[6], rows[7])
        return x_BTD + to_text(h, modulated(context_BLD, *prompt)) * rows[8]

    def _across(
        self,
        x_BND: Tensor,
        y_BAD: Tensor,
        video: StreamModulation,
        audio: StreamModulation,
        rope: RopeTables,
        v2a_source: V2ASource,
    ) -> tuple[Tensor, Tensor]:
        """Audio into video, then video into audio; rows of these tables have the scale first."""
        table, audio_table = (
            self.scale_shift_table_a2v_ca_video,
            self.scale_shift_table_a2v_ca_audio,
        )
        c0, h0, c1, h1 = video.cross.with_table(table[:4])
        d0, t0, d1, t1 = audio.cross.with_table(audio_table[:4])
        (gate,) = video.gate.with_table(table[4:])
        (audio_gate,) = audio.gate.with_table(audio_table[4:])
        nx, ny = rms(x_BND, self.eps), rms(y_BAD, self.eps)
        x = self.audio_to_video_attn(
            modulated(nx, h0, c0), modulated(ny, t0, d0), rope.video_cross, rope.audio_cross
        )
        x_BND = gated_sum(x_BND, x, gate, self.form)
        if v2a_source == "post_a2v":
            nx = rms(x_BND, self.eps)
        y = self.video_to_audio_attn(
            modulated(ny, t1, d1), modulated(nx, h1, c1), rope.audio_cross, rope.video_cross
        )
        return x_BND, gated_sum(y_BAD, y, audio_gate, self.form)


def empty_table(rows: int, width: int) -> nn.Parameter:
    """A parameter that a file fills."""
    return nn.Parameter(torch.empty(rows, width))
