"""The LTX-2.5 denoiser, single device. Parameter names are the checkpoint's (ltx25.md section 3).

B batch, N video tokens, A audio tokens, T tokens of either, L text rows, C channels, D width of a
stream, H heads, d head width. Operand order is part of the model: on the CPU each form has the
bits of its program (forms.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.kernels.attention.base import Attend
from runtime.ltx.block import V2A_SOURCES, Block, Contexts, V2ASource, empty_table
from runtime.ltx.config import LTXConfig
from runtime.ltx.forms import MODEL, Form
from runtime.ltx.layers import modulated
from runtime.ltx.modulation import (
    StreamModulation,
    TokenTimes,
    add_heads,
    distinct,
    of_sigma,
    of_tokens,
)
from runtime.ltx.packing import RopeTables

__all__ = ["V2A_SOURCES", "Contexts", "LTXModel", "V2ASource"]


class LTXModel(nn.Module):
    """One velocity evaluation of both streams. keyframes: the file has their embedding."""

    keyframes_abs_pos_embedding: nn.Parameter | None

    def __init__(
        self, config: LTXConfig, attend: Attend, *, keyframes: bool, form: Form = MODEL
    ) -> None:
        super().__init__()
        self.config, self.form = config, form
        video, audio = config.video_dim, config.audio_dim
        self.patchify_proj = nn.Linear(config.in_channels, video)
        self.audio_patchify_proj = nn.Linear(config.audio_in_channels, audio)
        add_heads(self, config)
        embedding = empty_table(1, video) if keyframes else None
        self.register_parameter("keyframes_abs_pos_embedding", embedding)
        self.transformer_blocks = nn.ModuleList(
            Block(config, attend, form) for _ in range(config.num_layers)
        )
        self.scale_shift_table = empty_table(2, video)
        self.audio_scale_shift_table = empty_table(2, audio)
        self.proj_out = nn.Linear(video, config.out_channels)
        self.audio_proj_out = nn.Linear(audio, config.audio_out_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: that of the input projection, which is never quantised."""
        return self.patchify_proj.weight.dtype

    @property
    def rope_dtype(self) -> torch.dtype:
        """Of the tables that a forward gets: rotations run in it."""
        return self.dtype if self.form.rounded_rope else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patchify_proj.weight.device

    def forward(
        self,
        video_BNC: Tensor,
        audio_BAC: Tensor,
        context_video: Tensor,
        context_audio: Tensor,
        *,
        video_timestep_BN: Tensor | TokenTimes,
        audio_timestep_BA: Tensor | TokenTimes,
        video_sigma_B: Tensor,
        audio_sigma_B: Tensor,
        rope: RopeTables,
        keyframe_mask: Tensor,
        v2a_source: V2ASource = "pre_a2v",
    ) -> tuple[Tensor, Tensor]:
        """Velocities [B, N, C] and [B, A, C] in the compute dtype.

        Latents and contexts [B, L, D] of any dtype; times and sigmas fp32 in [0, 1], a time being
        0 where a token is frozen; rope and keyframe_mask ([1 or B, N, 1], 1 for tokens of a single
        frame) as packing gives them, on the model's device.
        """
        if v2a_source not in V2A_SOURCES:
            known = " or ".join(V2A_SOURCES)
            raise ValueError(f"v2a_source must be {known}, got {v2a_source!r}")
        modulation = self.modulate(
            video_timestep_BN, audio_timestep_BA, video_sigma_B, audio_sigma_B
        )
        x_BND, y_BAD = self.embed(video_BNC, audio_BAC, keyframe_mask)
        contexts = Contexts(
            video_BLD=context_video.to(self.dtype), audio_BLD=context_audio.to(self.dtype)
        )
        for block in self.transformer_blocks:
            x_BND, y_BAD = block(x_BND, y_BAD, contexts, *modulation, rope, v2a_source)
        return self.finish(x_BND, y_BAD, *modulation)

    def modulate(
        self,
        video_timestep_BN: Tensor | TokenTimes,
        audio_timestep_BA: Tensor | TokenTimes,
        video_sigma_B: Tensor,
        audio_sigma_B: Tensor,
    ) -> tuple[StreamModulation, StreamModulation]:
        """What the eight heads say of video and of audio.

        Each stream's own times, but for the gates: what comes from the other stream is weighed by
        that stream's sigma.
        """
        return (
            self._stream("", "video", "a2v", video_timestep_BN, video_sigma_B, audio_sigma_B),
            self._stream("audio_", "audio", "v2a", audio_timestep_BA, audio_sigma_B, video_sigma_B),
        )

    def _stream(
        self,
        lead: str,
        stream: str,
        gate: str,
        timestep_BT: Tensor | TokenTimes,
        sigma_B: Tensor,
        other_sigma_B: Tensor,
    ) -> StreamModulation:
        scale, gate_scale = (
            self.config.timestep_scale_multiplier,
            self.config.av_ca_timestep_scale_multiplier,
        )
        times = self._times(timestep_BT)
        sigma_B, other_sigma_B = sigma_B.to(self.device), other_sigma_B.to(self.device)
        head = self.get_submodule
        block, embedded = of_tokens(head(f"{lead}adaln_single"), times, scale)
        cross = head(f"av_ca_{stream}_scale_shift_adaln_single")
        return StreamModulation(
            block=block,
            prompt=of_sigma(head(f"{lead}prompt_adaln_single"), sigma_B, scale),
            cross=of_tokens(cross, times, scale)[0],
            gate=of_sigma(head(f"av_ca_{gate}_gate_adaln_single"), other_sigma_B, gate_scale),
            final=embedded,
        )

    def _times(self, timestep_BT: Tensor | TokenTimes) -> TokenTimes:
        # Fewer rows change the bits of an fp32 product on the CPU; those of a bf16 one they do not.
        if isinstance(timestep_BT, Tensor):
            per_token = self.form.rows_per_token and self.dtype == torch.float32
            timestep_BT = TokenTimes(values_BU=timestep_BT) if per_token else distinct(timestep_BT)
        index_BT = timestep_BT.index_BT
        return TokenTimes(
            values_BU=timestep_BT.values_BU.to(self.device),
            index_BT=None if index_BT is None else index_BT.to(self.device),
        )

    def embed(
        self, video_BNC: Tensor, audio_BAC: Tensor, keyframe_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both streams at their width; tokens of single frames get the keyframes' embedding."""
        x_BND = self.patchify_proj(video_BNC.to(self.dtype))
        if self.keyframes_abs_pos_embedding is not None:
            marker = (keyframe_mask > 0).to(x_BND.dtype)
            x_BND = x_BND + marker * self.keyframes_abs_pos_embedding.to(x_BND.dtype)
        return x_BND, self.audio_patchify_proj(audio_BAC.to(self.dtype))

    def finish(
        self, x_BND: Tensor, y_BAD: Tensor, video: StreamModulation, audio: StreamModulation
    ) -> tuple[Tensor, Tensor]:
        """The last block's streams to velocities."""
        x = _final(x_BND, video, self.scale_shift_table)
        y = _final(y_BAD, audio, self.audio_scale_shift_table)
        return self.proj_out(x), self.audio_proj_out(y)


def _final(x_BTD: Tensor, of: StreamModulation, table_2D: Tensor) -> Tensor:
    twice = of.final.repeated(len(table_2D))
    shift, scale = twice.with_table(table_2D)
    return modulated(F.layer_norm(x_BTD, x_BTD.shape[-1:], eps=1e-6), shift, scale)
