"""Which attention backends are open for LTX: those that take cross attention and were tried on it.

The denoiser attends from N rows to a context of other rows, with heads of two widths.
"""

from __future__ import annotations

import torch

from runtime.kernels.attention import (
    Attend,
    AttentionOptions,
    attention_backend,
    load_attention,
)
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.config import LTXConfig

OPEN = ("sdpa", "sdpa_math", "sdpa_cudnn", "sage2")


def load_ltx_attention(
    name: str, config: LTXConfig, device: torch.device, dtype: torch.dtype
) -> Attend:
    """The named backend for both streams' heads; ValueError for an unknown name.

    Unavailable for one that is not open for LTX, or that cannot run here in that dtype, before any
    weight is read.
    """
    attention_backend(name)
    if name not in OPEN:
        raise Unavailable(
            name, f"it has not passed the gate on LTX; choose attention {', '.join(OPEN)}"
        )
    options = AttentionOptions()
    attends = [
        load_attention(name, device, dtype, options, head_dim=head_dim)
        for head_dim in (config.attention_head_dim, config.audio_attention_head_dim)
    ]
    return attends[0]
