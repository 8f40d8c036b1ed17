"""torch's scaled_dot_product_attention: the plain baseline (flash kernel pinned on CUDA)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions


def _attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd)
    return out_BHSd.transpose(1, 2).flatten(2)


def _attend_flash(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    # Pinned: torch would otherwise choose by shape, and a run must know what it measured. fp32
    # (text tower, fp32 VAE) has no flash kernel; for it the pin names the efficient one.
    fp32 = q_BHSd.dtype == torch.float32
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if fp32 else SDPBackend.FLASH_ATTENTION):
        return _attend(q_BHSd, k_BHSd, v_BHSd)


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """CPU: torch's CPU kernel; CUDA: flash attention for half types, efficient for fp32."""
    del options
    return _attend_flash if device.type == "cuda" else _attend


def route(device: torch.device, options: AttentionOptions) -> str:
    """Kernel and version for the run record."""
    del options
    kernel = "flash (fp32: efficient)" if device.type == "cuda" else "cpu"
    return f"torch {torch.__version__} SDPA {kernel}"


BACKEND = AttentionBackend(name="sdpa", load=load, route=route)
