"""AdaLN of LTX: the timestep embedding, the eight heads, rows of tables per token (section 3.1).

B batch, T tokens, U distinct times, R rows of a head, k rows of a table, d width of a stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.ltx.config import ADALN_HEADS, FREQUENCIES, LTXConfig

_LONGEST_PERIOD = 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """Times in [0, 1] of tokens. index_BT: which of the U times a token has; None if U is 1 (one
    for all) or T (each its own).

    On the CPU or on the model's device; `distinct` makes one from a time per token.
    """

    values_BU: Tensor
    index_BT: Tensor | None = None


def distinct(time_BT: Tensor) -> TokenTimes:
    """The times that occur, each once per batch item; waits for the GPU if they are there."""
    values, index = time_BT.unique(return_inverse=True)
    values_BU = values.expand(len(time_BT), -1)
    return TokenTimes(values_BU=values_BU, index_BT=index if values.numel() > 1 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """What a head says of tokens: rows of its U times, and which one a token takes."""

    rows_BUM: Tensor
    index_BT: Tensor | None

    def with_table(self, table_kd: Tensor) -> tuple[Tensor, ...]:
        """k rows [B, 1 or T, d] of table + head.

        An fp32 table is added in fp32 and the sum rounded once; one that was rounded at load (as
        ComfyUI does) is added in its own dtype.
        """
        rows_BUkd = table_kd + self.rows_BUM.unflatten(-1, table_kd.shape)
        return tuple(self._spread(row) for row in rows_BUkd.to(self.rows_BUM.dtype).unbind(2))

    def repeated(self, rows: int) -> TokenRows:
        """The same row for each of so many rows of a table."""
        repeated_BUM = self.rows_BUM.repeat(1, 1, rows)
        return TokenRows(rows_BUM=repeated_BUM, index_BT=self.index_BT)

    def per_token(self) -> Tensor:
        """The head's own output [B, 1 or T, k*d]."""
        return self._spread(self.rows_BUM)

    def _spread(self, row_BUd: Tensor) -> Tensor:
        if self.index_BT is None:
            return row_BUd
        if row_BUd.shape[1] == 2:  # frozen and live tokens: no gather
            first, second = row_BUd.split(1, dim=1)
            return torch.where(self.index_BT[..., None] == 0, first, second)
        return torch.take_along_dim(row_BUd, self.index_BT[..., None], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamModulation:
    """The heads of one stream; the gate comes from the other stream's sigma."""

    block: TokenRows  # shift, scale, gate: self attention, feed-forward, text query
    prompt: TokenRows  # shift, scale of the text
    cross: TokenRows  # scale, shift as in A2V, scale, shift as in V2A
    gate: TokenRows  # of what comes from the other stream
    final: TokenRows  # the embedded timestep, added to both rows of the output's table


class TimestepEmbedder(nn.Module):
    """Linear, SiLU, Linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, sinusoids_RF: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(sinusoids_RF)))


class TimestepEmbedding(nn.Module):
    """Holds the embedder under the checkpoint's name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(width)

    def forward(self, timestep_R: Tensor) -> Tensor:
        dtype = self.timestep_embedder.linear_2.weight.dtype
        return self.timestep_embedder(sinusoids(timestep_R).to(dtype))


class AdaLNHead(nn.Module):
    """Scaled timesteps [R] fp32 -> (modulation [R, k*d], embedded timestep [R, d])."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.emb = TimestepEmbedding(width)
        self.linear = nn.Linear(width, rows * width)

    def forward(self, timestep_R: Tensor) -> tuple[Tensor, Tensor]:
        embedded_Rd = self.emb(timestep_R)
        return self.linear(F.silu(embedded_Rd)), embedded_Rd


def sinusoids(timestep_R: Tensor) -> Tensor:
    """[R, 256] fp32: 128 cosines, then the sines, of t * 10000^(-i/128)."""
    half = FREQUENCIES // 2
    index = torch.arange(half, dtype=torch.float32, device=timestep_R.device)
    frequency = torch.exp(-math.log(_LONGEST_PERIOD) * index / half)
    angle_RF = timestep_R[:, None].float() * frequency
    return torch.cat([angle_RF.cos(), angle_RF.sin()], dim=-1)


def add_heads(model: nn.Module, config: LTXConfig) -> None:
    """Gives a model its eight heads under their names."""
    for name, (audio, rows) in ADALN_HEADS.items():
        model.add_module(name, AdaLNHead(config.stream_dim(audio), rows))


def of_tokens(head: nn.Module, times: TokenTimes, scale: float) -> tuple[TokenRows, TokenRows]:
    """(modulation, embedded timestep) of tokens; the head runs once per distinct time."""
    values_BU, index_BT = times.values_BU, times.index_BT
    found = head((values_BU * scale).flatten())
    rows = [x.unflatten(0, values_BU.shape) for x in found]
    return (
        TokenRows(rows_BUM=rows[0], index_BT=index_BT),
        TokenRows(rows_BUM=rows[1], index_BT=index_BT),
    )


def of_sigma(head: nn.Module, sigma_B: Tensor, scale: float) -> TokenRows:
    """Modulation by one sigma for all tokens."""
    return of_tokens(head, TokenTimes(values_BU=sigma_B[:, None]), scale)[0]
