"""The H3 denoiser, single device. Parameter names are the checkpoint's (contract 1).

S packed rows, L text rows, D hidden, H heads, d head dim, M distinct times, E modulation vectors.
Operand order, in-place updates and views are part of the model: parity before tidying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.h3.config import NORM_EPS, NUM_MODALITIES, PATCH, H3Config
from runtime.h3.modulation import Lend, TableCache, Tables, resident
from runtime.kernels.attention.base import Attend, PackedRows
from runtime.kernels.elementwise import Elementwise

# fp32 weights with fp32 activations whatever the compute dtype (contract 1.4a)
FP32_ISLANDS = (
    "video_patch_proj.",
    "audio_patch_proj.",
    "time_embedder.",
    "final_layer.video_out.",
    "final_layer.audio_out.",
    "adaln_t_table",
    "rope.inv_freq",
)


class RowSpan(NamedTuple):
    """Rows [start, stop) that share one AdaLN table row (timestep index * 3 + modality)."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInputs:
    """What stays the same at every step of one request, on the model's device."""

    context_LD: Tensor  # refined text, compute dtype
    rope: Tensor  # [1, S, 1, 48, 2, 2], compute dtype
    condition_video: Tensor | None  # [rows, 96] fp32, keyframes then references, noise applied
    condition_audio: Tensor | None  # [rows, 32] fp32
    segments: tuple[tuple[int, int, str], ...]  # (start, stop, kind) over S


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Timestep classes of one step: distinct times, and which table row each span uses."""

    times_M: Tensor  # [M] fp32, ascending, on the CPU
    spans: tuple[RowSpan, ...]
    video_time: int  # index into times_M of the target video
    audio_time: int


class Attention(nn.Module):
    """Full attention over all packed rows; q/k RMSNorm, rotation where a table is given."""

    def __init__(self, cfg: H3Config, attend: Attend, ops: Elementwise) -> None:
        super().__init__()
        inner = cfg.num_heads * cfg.head_dim
        self.heads, self.head_dim = cfg.num_heads, cfg.head_dim
        self.qkv_proj = nn.Linear(cfg.hidden, 3 * inner, bias=False)
        self.q_norm = nn.RMSNorm(cfg.head_dim, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(cfg.head_dim, eps=NORM_EPS)
        self.out_proj = nn.Linear(inner, cfg.hidden, bias=False)
        self.attend, self.ops = attend, ops

    def forward(self, x_SD: Tensor, rope: Tensor | None) -> Tensor:
        qkv = self.qkv_proj(x_SD)
        q, k, v = (t.unflatten(-1, (self.heads, self.head_dim)) for t in qkv.chunk(3, dim=-1))
        if rope is None:
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            self.ops.rms_rope(q, k, rope, self.q_norm.weight, self.k_norm.weight, NORM_EPS)
        out = self.attend(*(t[None].transpose(1, 2) for t in (q, k, v)))
        return self.out_proj(out[0])


class MLP(nn.Module):
    """SwiGLU with the gate half first."""

    def __init__(self, cfg: H3Config, ops: Elementwise) -> None:
        super().__init__()
        self.fc1 = nn.Linear(cfg.hidden, 2 * cfg.ffn, bias=False)
        self.fc2 = nn.Linear(cfg.ffn, cfg.hidden, bias=False)
        self.ops = ops

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.fc2(self.ops.swiglu(self.fc1(x_SD)))


class AdaLN(nn.Module):
    """t_emb [M, time_dim] -> E tables of [M * modalities, D]; SiLU in the full form only (1.12)."""

    def __init__(self, cfg: H3Config, num_vectors: int, num_modalities: int) -> None:
        super().__init__()
        width = num_vectors * num_modalities * cfg.hidden
        self.linear = nn.Linear(cfg.time_dim, width)
        self.silu = not cfg.pruned
        self.num_vectors, self.num_modalities = num_vectors, num_modalities

    def forward(self, t_emb: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(F.silu(t_emb) if self.silu else t_emb)
        y = y.reshape(t_emb.shape[0] * self.num_modalities, -1)
        return y.chunk(self.num_vectors, dim=-1)


class Block(nn.Module):
    """Pre-norm attention and MLP, modulated per row span in the rounding order of contract 1.13."""

    def __init__(self, cfg: H3Config, attend: Attend, ops: Elementwise) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(cfg.hidden, eps=NORM_EPS)
        self.attn = Attention(cfg, attend, ops)
        self.norm2 = nn.RMSNorm(cfg.hidden, eps=NORM_EPS)
        self.mlp = MLP(cfg, ops)
        self.adaln_proj = AdaLN(cfg, 6, NUM_MODALITIES)
        self.ops = ops

    def forward(
        self, x_SD: Tensor, tables: Sequence[Tensor], spans: Sequence[RowSpan], rope: Tensor
    ) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = tables
        ops = self.ops
        y = ops.norm_modulate(self.norm1, x_SD, shift_msa, scale_msa, spans)
        y = ops.gated_add_norm(
            x_SD, self.attn(y, rope), gate_msa, self.norm2, shift_mlp, scale_mlp, spans
        )
        return ops.gated_add(x_SD, self.mlp(y), gate_mlp, spans)


class RefinerBlock(nn.Module):
    """A text block without rotation or AdaLN; the sum is taken into the fresh output."""

    def __init__(self, cfg: H3Config, attend: Attend, ops: Elementwise) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(cfg.hidden, eps=NORM_EPS)
        self.attn = Attention(cfg, attend, ops)
        self.norm2 = nn.RMSNorm(cfg.hidden, eps=NORM_EPS)
        self.mlp = MLP(cfg, ops)

    def forward(self, x_LD: Tensor) -> Tensor:
        x_LD = self.attn(self.norm1(x_LD), None).add_(x_LD)
        return self.mlp(self.norm2(x_LD)).add_(x_LD)


class TokenRefiner(nn.Module):
    """Refines the projected text once per request."""

    def __init__(self, cfg: H3Config, attend: Attend, ops: Elementwise) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            RefinerBlock(cfg, attend, ops) for _ in range(cfg.num_refiner_layers)
        )
        self.final_norm = nn.RMSNorm(cfg.hidden, eps=NORM_EPS)

    def forward(self, x_LD: Tensor) -> Tensor:
        for block in self.blocks:
            x_LD = block(x_LD)
        return self.final_norm(x_LD)


class TimeEmbedder(nn.Module):
    """Full form: sinusoids (cos first, t in [0, 1]) through two fp32 linears (1.11)."""

    def __init__(self, cfg: H3Config) -> None:
        super().__init__()
        self.proj_in = nn.Linear(cfg.frequency_dim, cfg.time_hidden)
        self.proj_out = nn.Linear(cfg.time_hidden, cfg.time_dim)

    def forward(self, t_M: Tensor) -> Tensor:
        half = self.proj_in.in_features // 2
        index = torch.arange(half, dtype=torch.float32, device=t_M.device)
        frequencies = torch.exp(-math.log(10000) * index / half)
        args = t_M[:, None] * frequencies[None]
        embedding = torch.cat([args.cos(), args.sin()], dim=-1)
        return self.proj_out(F.silu(self.proj_in(embedding)))


class Rope(nn.Module):
    """Holds inv_freq; angles = [t | h | w] * inv_freq in fp32 (1.14)."""

    inv_freq: Tensor

    def __init__(self, cfg: H3Config) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(cfg.num_inv_freq))

    def forward(self, positions_S3: Tensor) -> Tensor:
        angles = positions_S3.to(torch.float32)[:, :, None] * self.inv_freq
        return angles.flatten(1)


class FinalLayer(nn.Module):
    """Target rows only: norm, modulate by the stream's time, fp32 heads (1.16)."""

    def __init__(self, cfg: H3Config) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(cfg.hidden, eps=NORM_EPS)
        self.adaln_proj = AdaLN(cfg, 2, 1)
        self.video_out = nn.Linear(cfg.hidden, cfg.video_channels * PATCH**2)
        self.audio_out = nn.Linear(cfg.hidden, cfg.audio_channels)

    def forward(
        self, video_SD: Tensor, audio_SD: Tensor, tables: Sequence[Tensor], rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        shift, scale = tables
        video = self._modulated(video_SD, shift[rows.video_time], scale[rows.video_time])
        audio = self._modulated(audio_SD, shift[rows.audio_time], scale[rows.audio_time])
        return self.video_out(video), self.audio_out(audio)

    def _modulated(self, x_SD: Tensor, shift_D: Tensor, scale_D: Tensor) -> Tensor:
        # No casts here: fp32 tables (pruned) lift the expression to fp32, bf16 tables round it
        # three times. Both are what ComfyUI computes.
        return (self.norm(x_SD) * (1 + scale_D) + shift_D).float()


class H3Model(nn.Module):
    """One velocity evaluation over the packed sequence; batch 1, rows never padded."""

    adaln_t_table: Tensor

    def __init__(self, cfg: H3Config, attend: Attend, ops: Elementwise) -> None:
        super().__init__()
        self.cfg = cfg
        self.video_patch_proj = nn.Linear(cfg.video_channels * PATCH**2, cfg.hidden)
        self.audio_patch_proj = nn.Linear(cfg.audio_channels, cfg.hidden)
        self.condition_proj = nn.Linear(cfg.text_dim, cfg.hidden)
        self.token_refiner = TokenRefiner(cfg, attend, ops)
        self.rope = Rope(cfg)
        if cfg.pruned:
            self.register_buffer("adaln_t_table", torch.empty(cfg.curve_grid, cfg.time_dim))
        else:
            self.time_embedder = TimeEmbedder(cfg)
        self.blocks = nn.ModuleList(Block(cfg, attend, ops) for _ in range(cfg.num_layers))
        self.final_layer = FinalLayer(cfg)
        self.packed_rows = PackedRows()  # load_denoiser puts the one that its attention reads
        self.tables = TableCache()
        self.lend: Lend = resident  # load_denoiser puts another where the weights lie elsewhere

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: that of the norms, which are never quantised."""
        return self.final_layer.norm.weight.dtype

    def refine(self, context_LC: Tensor) -> Tensor:
        """Text states [L, text_dim] fp32 -> [L, D], compute dtype, once per request (1.10)."""
        self.packed_rows.conditioning = 0
        return self.token_refiner(self.condition_proj(context_LC.to(self.dtype)))

    def embed_time(self, t_M: Tensor) -> Tensor:
        """Distinct times [M] fp32 -> t_emb [M, time_dim]: fp32 (pruned) or compute dtype (full)."""
        if not self.cfg.pruned:
            return self.time_embedder(t_M).to(self.dtype)
        grid = self.cfg.curve_grid
        p = t_M.clamp(0, 1) * (grid - 1)
        low = p.floor().clamp(max=grid - 2).long()
        weight = (p - low).unsqueeze(-1)
        return torch.lerp(self.adaln_t_table[low], self.adaln_t_table[low + 1], weight)

    @property
    def adaln_layers(self) -> list[nn.Module]:
        """The blocks' in order, then the final layer's."""
        blocks = [block.get_submodule("adaln_proj") for block in self.blocks]
        return [*blocks, self.final_layer.adaln_proj]

    def modulation(self, times: Sequence[Tensor]) -> list[Tables]:
        """The AdaLN tables of several steps, each from its times [M]: layer by layer, as `lend`
        may have to bring each layer's weights."""
        device = self.final_layer.norm.weight.device
        embedded = [self.embed_time(t_M.to(device)) for t_M in times]
        steps: list[Tables] = [[] for _ in times]
        for layer in self.adaln_layers:
            with self.lend(layer):
                for tables, t_emb in zip(steps, embedded, strict=True):
                    tables.append(layer(t_emb))
        return steps

    def table_bytes(self, num_times: int) -> int:
        """Bytes of one step's tables: fp32 in the pruned form, else of the compute dtype."""
        rows = 6 * NUM_MODALITIES * len(self.blocks) + 2
        return num_times * rows * self.cfg.hidden * (4 if self.cfg.pruned else self.dtype.itemsize)

    def forward(
        self, video_rows: Tensor, audio_rows: Tensor, inputs: PackedInputs, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """Target rows [Nv, 96] and [Na, 32] fp32 -> data-ward velocities, fp32, same shapes."""
        tables = self.tables.at(rows.times_M, self)
        return self.evaluate(video_rows, audio_rows, inputs, rows, tables)

    def evaluate(
        self,
        video_rows: Tensor,
        audio_rows: Tensor,
        inputs: PackedInputs,
        rows: StepRows,
        tables: Tables,
    ) -> tuple[Tensor, Tensor]:
        """`forward` with the step's tables: everything that the GPU does in it, without a wait."""
        x_SD = self.embed(video_rows, audio_rows, inputs)
        x_SD = self.run_blocks(x_SD, tables, rows.spans, inputs.rope)
        return self.finish(x_SD, inputs, rows, tables)

    def embed(self, video_rows: Tensor, audio_rows: Tensor, inputs: PackedInputs) -> Tensor:
        """The packed buffer [S, D]: text copied, each stream projected in fp32 as one matrix."""
        video = self.video_patch_proj(_joined(inputs.condition_video, video_rows))
        audio = self.audio_patch_proj(_joined(inputs.condition_audio, audio_rows))
        num_rows = inputs.segments[-1][1]
        x_SD = torch.empty(num_rows, self.cfg.hidden, dtype=self.dtype, device=video.device)
        taken = {"video": 0, "audio": 0}
        for start, stop, kind in inputs.segments:
            if kind == "text":
                x_SD[start:stop] = inputs.context_LD
                continue
            stream, source = ("audio", audio) if "audio" in kind else ("video", video)
            first = taken[stream]
            x_SD[start:stop] = source[first : first + stop - start]
            taken[stream] = first + stop - start
        return x_SD

    def run_blocks(
        self,
        x_SD: Tensor,
        tables: Tables,
        spans: Sequence[RowSpan],
        rope: Tensor,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Blocks [start, stop) of the stack on all packed rows; x_SD is written over."""
        blocks = list(zip(self.blocks, tables[:-1], strict=True))
        for block, block_tables in blocks[start:stop]:
            x_SD = block(x_SD, block_tables, spans, rope)
        return x_SD

    def finish(
        self, x_SD: Tensor, inputs: PackedInputs, rows: StepRows, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """The last block's rows -> velocities of the target rows, fp32: video, audio."""
        (a0, a1, _), (v0, v1, _) = inputs.segments[-2:]  # target audio and video come last
        return self.final_layer(x_SD[v0:v1], x_SD[a0:a1], tables[-1], rows)


def _joined(conditions: Tensor | None, target: Tensor) -> Tensor:
    return target if conditions is None else torch.cat([conditions, target])


def patchify(latent: Tensor) -> Tensor:
    """[1, C, T, h, w] -> [T*(h/2)*(w/2), C*4]; odd sides wrap around to even (contract 1.5)."""
    height, width = latent.shape[-2:]
    if height % 2 or width % 2:
        latent = F.pad(latent, (0, width % 2, 0, height % 2, 0, 0), mode="circular")
    _, channels, frames, height, width = latent.shape
    x = latent[0].reshape(channels, frames, height // 2, 2, width // 2, 2)
    return x.permute(1, 2, 4, 0, 3, 5).reshape(frames * (height // 2) * (width // 2), channels * 4)


def unpatchify(rows: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Inverse of patchify: rows -> [1, C, T, h, w] of that (unpadded) shape."""
    _, channels, frames, height, width = shape
    grid_h, grid_w = -(-height // 2), -(-width // 2)
    x = rows.reshape(frames, grid_h, grid_w, channels, 2, 2)
    x = x.permute(3, 0, 1, 4, 2, 5).reshape(1, channels, frames, grid_h * 2, grid_w * 2)
    return x[..., :height, :width]


def pack_audio(latent: Tensor) -> Tensor:
    """[1, C, 2, T] -> [2*T, C], stereo channel outer."""
    return latent[0].permute(1, 2, 0).reshape(-1, latent.shape[1])


def unpack_audio(rows: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Inverse of pack_audio."""
    _, channels, stereo, frames = shape
    return rows.reshape(stereo, frames, channels).permute(2, 0, 1)[None]
