"""The Qwen3-VL vision tower: pictures to embeddings and DeepStack features, all in fp32.

Axes: F frames, H W pixels, P patches in merge-block order, E patch values (3*2*16*16), D vision
width, M merged tokens (P/4), C language width, G heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.h3.sizes import vision_size
from runtime.h3.text_linear import Linear, frequencies, rotate

PATCH, FRAMES, MERGE = 16, 2, 2
POSITION_SIDE = 48
NUM_HEADS = 16
_EPS = 1e-6
_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes read from tensor shapes; `taps` (blocks with a DeepStack merger) are not in them."""

    width: int
    depth: int
    ffn: int
    out: int
    taps: tuple[int, ...]


def patchify(frames_FHWC: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """One or two frames in [0,1] to patches [P,E] and the patch grid (rows, columns) (5.3)."""
    height, width = vision_size(frames_FHWC.shape[1], frames_FHWC.shape[2])
    x_FCHW = F.interpolate(
        frames_FHWC.permute(0, 3, 1, 2), size=(height, width), mode="bilinear", align_corners=False
    )
    x_FCHW = (x_FCHW - 0.5) / 0.5
    if x_FCHW.shape[0] == 1:
        x_FCHW = x_FCHW.repeat(FRAMES, 1, 1, 1)
    rows, columns = height // PATCH, width // PATCH
    blocks = x_FCHW.reshape(
        FRAMES, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH
    ).permute(2, 5, 3, 6, 1, 0, 4, 7)
    return blocks.reshape(rows * columns, -1), (rows, columns)


def _merge_order(x: Tensor, rows: int, columns: int) -> Tensor:
    """Row-major [rows*columns, ...] to merge-block order: 2x2 neighbours become consecutive."""
    blocks = x.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, -1)
    return blocks.transpose(1, 2).reshape(rows * columns, -1)


def position_rows(table: Tensor, rows: int, columns: int) -> Tensor:
    """Bilinear samples [P,D] of the 48x48 table; products and sums round to its dtype (5.4)."""
    last = POSITION_SIDE - 1
    y = torch.linspace(0, last, rows, device=table.device)
    x = torch.linspace(0, last, columns, device=table.device)
    y0, x0 = y.long(), x.long()
    y1, x1 = (y0 + 1).clamp(max=last), (x0 + 1).clamp(max=last)
    dy, dx = y - y0, x - x0
    taps = (
        (y0, x0, 1 - dy, 1 - dx),
        (y0, x1, 1 - dy, dx),
        (y1, x0, dy, 1 - dx),
        (y1, x1, dy, dx),
    )
    total: Tensor | None = None
    for at_y, at_x, weight_y, weight_x in taps:
        index = (at_y[:, None] * POSITION_SIDE + at_x).flatten()
        weight = (weight_y[:, None] * weight_x).flatten().to(table.dtype)
        product = table[index] * weight[:, None]
        total = product if total is None else total + product
    assert total is not None
    return _merge_order(total, rows, columns)


def rotation(rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [P,1,head_dim]: [row*inv | column*inv] twice (contract 5.4)."""
    inverse = frequencies(head_dim // 4, _THETA, device)
    y = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    x = torch.arange(columns, device=device).expand(rows, columns)
    angles = [_merge_order(axis.reshape(-1, 1), rows, columns) * inverse for axis in (y, x)]
    angle_PD = torch.cat(angles * 2, dim=-1)[:, None]
    return angle_PD.cos(), angle_PD.sin()


def _attend(q_PGD: Tensor, k_PGD: Tensor, v_PGD: Tensor) -> Tensor:
    """Full attention inside one picture, [P,D]; SDPA whatever the plan names (contract 5.5)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_PGD, k_PGD, v_PGD))
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width, bias=True)
        self.proj = Linear(width, width, bias=True)

    def forward(self, x_PD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x_PD).view(len(x_PD), 3, NUM_HEADS, -1).unbind(1)
        return self.proj(_attend(rotate(q, cos, sin), rotate(k, cos, sin), v))


class _MLP(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(width, ffn, bias=True)
        self.linear_fc2 = Linear(ffn, width, bias=True)

    def forward(self, x_PD: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x_PD), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=_EPS)
        self.attn = _Attention(config.width)
        self.norm2 = nn.LayerNorm(config.width, eps=_EPS)
        self.mlp = _MLP(config.width, config.ffn)

    def forward(self, x_PD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), cos, sin)
        return x_PD + self.mlp(self.norm2(x_PD))


class _Merger(nn.Module):
    """Four neighbouring patches to one language token; DeepStack norms after grouping them."""

    def __init__(self, config: VisionConfig, *, norm_grouped: bool) -> None:
        super().__init__()
        self.grouped = MERGE * MERGE * config.width
        self.norm_grouped = norm_grouped
        self.norm = nn.LayerNorm(self.grouped if norm_grouped else config.width, eps=_EPS)
        self.linear_fc1 = Linear(self.grouped, self.grouped, bias=True)
        self.linear_fc2 = Linear(self.grouped, config.out, bias=True)

    def forward(self, x_PD: Tensor) -> Tensor:
        x = x_PD.view(-1, self.grouped) if self.norm_grouped else x_PD
        return self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).view(-1, self.grouped))))


class _PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        size = (FRAMES, PATCH, PATCH)
        self.proj = nn.Conv3d(3, width, kernel_size=size, stride=size)

    def forward(self, patches_PE: Tensor) -> Tensor:
        return self.proj(patches_PE.view(-1, 3, FRAMES, PATCH, PATCH)).flatten(1)


class _Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(POSITION_SIDE**2, width), requires_grad=False)


class VisionTower(nn.Module):
    """One picture (or frame pair) at a time; parameter names are the checkpoint's (5.1)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = _PatchEmbed(config.width)
        self.pos_embed = _Positions(config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.merger = _Merger(config, norm_grouped=False)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(config, norm_grouped=True) for _ in config.taps
        )

    def forward(self, patches_PE: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
        """Patches of grid (rows, columns) to the merged tokens [M,C] and one [M,C] per tap."""
        rows, columns = grid
        x_PD = self.patch_embed(patches_PE)
        x_PD = x_PD + position_rows(self.pos_embed.weight, rows, columns).float()
        cos, sin = rotation(rows, columns, self.config.width // NUM_HEADS, x_PD.device)
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x_PD = block(x_PD, cos, sin)
            if index in self.config.taps:
                features.append(self.deepstack_merger_list[len(features)](x_PD))
        return self.merger(x_PD), features
