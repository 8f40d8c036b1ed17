"""torch's scaled_dot_product_attention with the cuDNN kernel pinned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.kernels.attention import sdpa
from runtime.kernels.attention.base import Attend, AttentionBackend, AttentionOptions
from runtime.kernels.unavailable import Unavailable


def _attend(q_BHSd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> Tensor:
    # cuDNN has no fp32 attention and none over a single row (the text of an empty prompt): the
    # route string says so.
    if q_BHSd.dtype == torch.float32 or 1 in (q_BHSd.shape[2], k_BHSd.shape[2]):
        return sdpa.load(q_BHSd.device, AttentionOptions())(q_BHSd, k_BHSd, v_BHSd)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd)
    return out_BHSd.transpose(1, 2).flatten(2)


def load(device: torch.device, options: AttentionOptions) -> Attend:
    """Needs a CUDA device whose cuDNN offers attention (compute capability 8.0 or newer)."""
    del options
    if device.type != "cuda":
        raise Unavailable("sdpa_cudnn", f"it needs a CUDA device, got {device}")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise Unavailable("sdpa_cudnn", "cuDNN attention needs compute capability 8.0 or newer")
    return _attend


def route(device: torch.device, options: AttentionOptions) -> str:
    """Kernel and version for the run record."""
    del device, options
    version = torch.backends.cudnn.version()
    return f"torch {torch.__version__} SDPA cudnn {version} (fp32: efficient, one row: flash)"


BACKEND = AttentionBackend(
    name="sdpa_cudnn",
    load=load,
    route=route,
    requirement="a CUDA GPU of compute capability 8.0 or newer",
)
