"""torch's scaled_dot_product_attention with its math kernel pinned: matrix products and a softmax.

The whole score matrix is in memory, so heads run in groups and the number of rows has a limit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.unavailable import Unavailable

NAME = "sdpa_math"
BYTES_PER_SCORE = 12  # fp32 scores, their softmax, and one of them while the other is made
MOST_BYTES = 8 << 30  # of scores at once
MOST_ROWS = int((MOST_BYTES / BYTES_PER_SCORE) ** 0.5)


def heads_at_once(rows: int, tiles: int = 1, keys: int = 0) -> int:
    """Heads whose scores of all tiles fit in MOST_BYTES, at least one; Unavailable if not even
    those of one head and tile do. keys: as many as rows if not given."""
    scores = rows * (keys or rows)
    if scores > MOST_ROWS**2:
        got = f"{rows} by {keys} keys" if keys not in (0, rows) else str(rows)
        raise Unavailable(
            NAME,
            f"it keeps all scores of a head in memory and takes at most {MOST_ROWS} rows, got "
            f"{got}; choose attention sdpa",
        )
    return max(1, MOST_BYTES // (BYTES_PER_SCORE * scores * tiles))


def _attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    heads = heads_at_once(q_BHSd.shape[2], q_BHSd.shape[0], k_BHSd.shape[2])
    groups = zip(*(x.split(heads, dim=1) for x in (q_BHSd, k_BHSd, v_BHSd)), strict=True)
    with sdpa_kernel(SDPBackend.MATH):
        out = [F.scaled_dot_product_attention(q, k, v).transpose(1, 2) for q, k, v in groups]
    return torch.cat(out, dim=2).flatten(2)


def check_rows(rows: int) -> None:
    """Unavailable for more than MOST_ROWS."""
    heads_at_once(rows)


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """Any device."""
    del device, options
    return _attend


def route(device: torch.device, options: AttentionOptions) -> str:
    """Kernel and version for the run record."""
    del options
    return f"torch {torch.__version__} SDPA math on {device.type}"


BACKEND = AttentionBackend(
    name=NAME,
    load=load,
    route=route,
    requirement=f"any device, at most {MOST_ROWS} rows",
    check_rows=check_rows,
)
