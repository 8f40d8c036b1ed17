"""Parts of the LTX blocks and connectors: norm, modulation, rotation, attention, feed-forward.

B batch, T tokens, L rows of a context, D width of a stream, H heads, d head width, I = H * d.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.kernels.attention.base import Attend
from runtime.ltx.forms import Form
from runtime.ltx.packing import Rotation


def rms(x_BTD: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last axis, no weight; fp32 inside, rounded once."""
    return F.rms_norm(x_BTD, x_BTD.shape[-1:], eps=eps)


def modulated(x_BTD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x * (1 + scale) + shift."""
    return x_BTD * (1 + scale) + shift


def gated_sum(x_BTD: Tensor, out_BTD: Tensor, gate: Tensor, form: Form) -> Tensor:
    """x + out * gate."""
    if form.fused_sums:
        return torch.addcmul(x_BTD, out_BTD, gate)
    return x_BTD + out_BTD * gate


def rotated(x_BHTd: Tensor, rotation: Rotation, form: Form) -> Tensor:
    """Halves (a, b) of each head to (a cos - b sin, b cos + a sin), in the tables' dtype.

    The result lies in memory as x does.
    """
    cos, sin = rotation.cos_BHTr, rotation.sin_BHTr
    a, b = x_BHTd.to(cos.dtype).chunk(2, dim=-1)
    if form.fused_rotation:
        turned = torch.addcmul(a * cos, sin, b, value=-1), torch.addcmul(b * cos, sin, a)
    else:
        turned = a * cos - b * sin, b * cos + a * sin
    out_BHTd = torch.empty_like(x_BHTd)
    for half, values in zip(out_BHTd.chunk(2, dim=-1), turned, strict=True):
        half.copy_(values)
    return out_BHTd


class Attention(nn.Module):
    """Attention of x to a context, or to itself: q/k norm over all heads, rotation, head gates."""

    def __init__(
        self,
        width: int,
        context: int,
        heads: int,
        head_dim: int,
        *,
        attend: Attend,
        form: Form,
    ) -> None:
        super().__init__()
        inner, eps = heads * head_dim, form.qk_eps
        self.heads, self.attend, self.form = heads, attend, form
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(context, inner)
        self.to_v = nn.Linear(context, inner)
        self.q_norm = nn.RMSNorm(inner, eps=eps)
        self.k_norm = nn.RMSNorm(inner, eps=eps)
        self.to_gate_logits = nn.Linear(width, heads)
        self.to_out = nn.ModuleList([nn.Linear(inner, width)])

    def forward(
        self,
        x_BTD: Tensor,
        context_BLD: Tensor,
        rope: Rotation | None = None,
        context_rope: Rotation | None = None,
    ) -> Tensor:
        """[B, T, D]; the gate sees x as the queries do. No rope: no rotation (text)."""
        gate_BTH = 2.0 * torch.sigmoid(self.to_gate_logits(x_BTD))
        q = self._by_head(self.q_norm(self.to_q(x_BTD)))
        k = self._by_head(self.k_norm(self.to_k(context_BLD)))
        v = self._by_head(self.to_v(context_BLD))
        if rope is not None:
            q = rotated(q, rope, self.form)
            k = rotated(k, rope if context_rope is None else context_rope, self.form)
        out_BTI = self.attend(q, k, v)
        gated = out_BTI.unflatten(2, (self.heads, -1)) * gate_BTH.unsqueeze(-1)
        return self.to_out[0](gated.flatten(2))

    def _by_head(self, x_BTI: Tensor) -> Tensor:
        return x_BTI.unflatten(2, (self.heads, -1)).transpose(1, 2)


class GELU(nn.Module):
    """A projection and GELU (tanh)."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two linears with GELU between; `net` has the checkpoint's numbers."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        out = nn.Linear(inner, width, bias=bias)
        self.net = nn.ModuleDict({"0": GELU(width, inner, bias=bias), "2": out})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["2"](self.net["0"](x))
