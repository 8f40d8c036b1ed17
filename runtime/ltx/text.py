"""From the text tower's hidden states to the contexts of both streams (ltx25.md section 5).

`TextProjection` (weights in the text encoder's file) makes a feature per token and stream;
`Connectors` (weights in the denoiser's file) put them before learnt registers and refine them.
B batch, S text tokens as tokenised, D width of a stream, E hidden width of the tower, L its hidden
states, T = 1024 rows of a context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from runtime.kernels.attention.base import Attend
from runtime.ltx.config import FF_FACTOR, LTXConfig
from runtime.ltx.forms import MODEL, Form
from runtime.ltx.layers import Attention, FeedForward, rms
from runtime.ltx.model import Contexts
from runtime.ltx.packing import Rotation, rotation
from runtime.ltx.sizes import CONTEXT_ROWS

NORM_EPS = 1e-6


def token_features(hidden_BSEL: Tensor, mask_BS: Tensor) -> Tensor:
    """[B, S, E*L]: each hidden state over its RMS, states innermost; zeros where mask is 0."""
    mean_square = torch.mean(hidden_BSEL**2, dim=2, keepdim=True)
    normed = hidden_BSEL * torch.rsqrt(mean_square + NORM_EPS)
    return normed.flatten(2).masked_fill(~mask_BS.bool()[..., None], 0.0)


class TextProjection(nn.Module):
    """One linear per stream over all hidden states; named as in the text encoder's file."""

    def __init__(self, config: LTXConfig, states: int) -> None:
        super().__init__()
        self.caption_channels = config.caption_channels
        features = config.caption_channels * states
        self.video_aggregate_embed = nn.Linear(features, config.video_dim)
        self.audio_aggregate_embed = nn.Linear(features, config.audio_dim)

    def forward(self, hidden_BSEL: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """(video [B, S, D], audio [B, S, D]) of the tower's states; padded tokens give the bias."""
        features_BSF = token_features(hidden_BSEL, mask_BS)
        video, audio = (
            embed(features_BSF * math.sqrt(embed.out_features / self.caption_channels))
            for embed in (self.video_aggregate_embed, self.audio_aggregate_embed)
        )
        return video, audio


class ConnectorBlock(nn.Module):
    """Pre-norm self attention and feed-forward, norms without weight."""

    def __init__(self, heads: int, head_dim: int, attend: Attend, form: Form) -> None:
        super().__init__()
        width = heads * head_dim
        self.attn1 = Attention(width, width, heads, head_dim, attend=attend, form=form)
        self.ff = FeedForward(width, FF_FACTOR * width, bias=True)

    def forward(self, x_BTD: Tensor, rope: Rotation) -> Tensor:
        h = rms(x_BTD, NORM_EPS)
        x_BTD = x_BTD + self.attn1(h, h, rope)
        return x_BTD + self.ff(rms(x_BTD, NORM_EPS))


class Connector(nn.Module):
    """Refines the text of one stream."""

    learnable_registers: nn.Parameter

    def __init__(self, config: LTXConfig, attend: Attend, *, audio: bool, form: Form) -> None:
        super().__init__()
        self.heads, head_dim = config.connector_heads(audio)
        self.width = config.connector_dim(audio)
        self.span = config.connector_positional_embedding_max_pos
        self.theta = config.positional_embedding_theta
        registers = torch.empty(config.connector_num_learnable_registers, self.width)
        self.learnable_registers = nn.Parameter(registers)
        self.transformer_1d_blocks = nn.ModuleList(
            ConnectorBlock(self.heads, head_dim, attend, form)
            for _ in range(config.connector_num_layers)
        )

    def forward(self, features_BSD: Tensor, mask_BS: Tensor, rows: int) -> Tensor:
        """[B, rows, D] in the weights' dtype."""
        dtype, device = self.learnable_registers.dtype, self.learnable_registers.device
        x_BTD = with_registers(
            features_BSD.to(device, dtype), mask_BS.to(device), self.learnable_registers, rows
        )
        rope = self.rope(rows)
        for block in self.transformer_1d_blocks:
            x_BTD = block(x_BTD, rope)
        return rms(x_BTD, NORM_EPS)

    def rope(self, rows: int) -> Rotation:
        """Rotation by the row's index, fp32."""
        return rotation(
            [torch.arange(rows, dtype=torch.float32)],
            self.span,
            inner=self.width,
            heads=self.heads,
            theta=self.theta,
            device=self.learnable_registers.device,
        )


class Connectors(nn.Module):
    """Both connectors."""

    def __init__(self, config: LTXConfig, attend: Attend, *, form: Form = MODEL) -> None:
        super().__init__()
        self.video_embeddings_connector = Connector(config, attend, audio=False, form=form)
        self.audio_embeddings_connector = Connector(config, attend, audio=True, form=form)

    def forward(
        self, video_BSD: Tensor, audio_BSD: Tensor, mask_BS: Tensor, rows: int = CONTEXT_ROWS
    ) -> Contexts:
        """Contexts [B, rows, D] of the projected tokens; mask_BS: 1 where a token is no padding.

        Depends on the prompt alone: to be kept for all steps. ValueError if a prompt has more
        tokens than rows.
        """
        return Contexts(
            video_BLD=self.video_embeddings_connector(video_BSD, mask_BS, rows),
            audio_BLD=self.audio_embeddings_connector(audio_BSD, mask_BS, rows),
        )


def with_registers(x_BSD: Tensor, mask_BS: Tensor, registers_RD: Tensor, rows: int) -> Tensor:
    """[B, rows, D]: tokens whose mask is 1 in their order, then register `row % R` in every row."""
    keep_BS = mask_BS.bool()
    longest = int(keep_BS.sum(1).max())
    if longest > rows:
        raise ValueError(f"the prompt has {longest} tokens, a context has {rows}; shorten it")
    register_T = torch.arange(rows, device=x_BSD.device) % len(registers_RD)
    filled = registers_RD[register_T].to(x_BSD.dtype)
    pairs = zip(x_BSD, keep_BS, strict=True)
    return torch.stack([torch.cat([x[keep], filled[int(keep.sum()) :]]) for x, keep in pairs])
