"""The first 50 layers of the Qwen3 language model, fp32 activations, without the final norm.

Axes: L tokens, C residual width, G heads, D head width (128).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.h3.text_linear import Embedding, Linear, frequencies, rotate

NUM_LAYERS = 50  # the conditioning is the residual after layer index 49 (contract 5.1)
HEAD_DIM = 128
SECTIONS = (24, 20, 20)  # rope frequencies of the axes t, h, w; h and w interleave with t
_THETA = 5e6
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageConfig:
    """Sizes read from tensor shapes."""

    width: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocabulary: int


class RMSNorm(nn.Module):
    """torch's fused rms_norm; manual rsqrt variants differ in the last bit (contract 10)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), _EPS)


def rope_axes(device: torch.device) -> Tensor:
    """[64] which axis (0 t, 1 h, 2 w) turns rope frequency j: h at 1,4..58, w at 2,5..59 (5.5)."""
    axes = torch.zeros(HEAD_DIM // 2, dtype=torch.long, device=device)
    for axis in (1, 2):
        axes[axis : 3 * SECTIONS[axis] : 3] = axis
    return axes


def rope_tables(positions_3L: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [L,D] in fp32 of float positions (t, h, w) (contract 5.5)."""
    axes = rope_axes(positions_3L.device)
    inverse = frequencies(HEAD_DIM // 2, _THETA, positions_3L.device)
    angle = positions_3L[axes].t() * inverse
    angle_LD = torch.cat((angle, angle), dim=-1)
    return angle_LD.cos(), angle_LD.sin()


class _Attention(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        inner, kv = config.num_heads * HEAD_DIM, config.num_kv_heads * HEAD_DIM
        self.groups = config.num_heads // config.num_kv_heads
        self.q_proj = Linear(config.width, inner, bias=False)
        self.k_proj = Linear(config.width, kv, bias=False)
        self.v_proj = Linear(config.width, kv, bias=False)
        self.o_proj = Linear(inner, config.width, bias=False)
        self.q_norm = RMSNorm(HEAD_DIM)
        self.k_norm = RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        # Repeated heads and is_causal: bit-equal to ComfyUI's additive mask on a CPU, and on a GPU
        # fp32 keeps the memory-efficient kernel (enable_gqa would fall to the L x L one).
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.ffn, bias=False)
        self.up_proj = Linear(config.width, config.ffn, bias=False)
        self.down_proj = Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP on [1,L,C]."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """Embedding and layers; the encoder drives them so that it can tap, splice and stop between."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(NUM_LAYERS))
