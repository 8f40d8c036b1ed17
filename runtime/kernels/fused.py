"""Fused elementwise steps of the denoiser: the eager form is the reference, kernels are measured
against it.

S rows, H heads, d head dim, R rotated pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import comfy_kitchen as ck
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.elementwise.triton import load_kernels
from runtime.kernels.unavailable import Unavailable

# (q_SHd, k_SHd, table_1S1R22, q_weight_d, k_weight_d, eps) -> None: in place, views of one buffer
RmsRope = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], None]

RMS_ROPES = {  # name -> what it needs
    "eager": "any device",
    "kitchen": "a CUDA GPU that comfy-kitchen's CUDA backend supports",
    "triton": "a CUDA GPU and Triton, which comes with PyTorch for CUDA",
}


def rope_table(angles_SR: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, S, 1, R, 2, 2] rotation matrices [[cos, -sin], [sin, cos]], rounded to dtype (1.14)."""
    cos, sin = angles_SR.cos(), angles_SR.sin()
    rows, pairs = angles_SR.shape
    matrices = torch.stack([cos, -sin, sin, cos], dim=-1).reshape(1, rows, 1, pairs, 2, 2)
    return matrices.to(dtype)


def rms_rope_eager(
    q_SHd: Tensor, k_SHd: Tensor, table: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> None:
    """RMSNorm over the head, then rotation of its first 2R dims, every operation rounded (1.14)."""
    for x_SHd, weight in ((q_SHd, q_weight), (k_SHd, k_weight)):
        x_SHd.copy_(_rms_rotate(x_SHd, table[0], weight, eps))


def _rms_rotate(x_SHd: Tensor, table_S1R22: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    y_SHd = F.rms_norm(x_SHd, (x_SHd.shape[-1],), weight_d, eps)
    pairs = table_S1R22.shape[2]
    low, high = y_SHd[..., :pairs], y_SHd[..., pairs : 2 * pairs]
    cos, minus_sin = table_S1R22[..., 0, 0], table_S1R22[..., 0, 1]
    sin, cos_again = table_S1R22[..., 1, 0], table_S1R22[..., 1, 1]
    rotated_low = cos * low + minus_sin * high
    rotated_high = sin * low + cos_again * high
    return torch.cat([rotated_low, rotated_high, y_SHd[..., 2 * pairs :]], dim=-1)


def _rms_rope_kitchen(
    q_SHd: Tensor, k_SHd: Tensor, table: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> None:
    with ck.use_backend("cuda"):
        ck.rms_rope_split_half_(
            q_SHd[None], k_SHd[None], table, q_weight, k_weight, eps, 2 * table.shape[3]
        )


def _triton(device: torch.device) -> RmsRope:
    kernels = load_kernels("triton", device)

    def rms_rope(
        q_SHd: Tensor, k_SHd: Tensor, table: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> None:
        kernels.rms_rope(q_SHd, table, q_weight, eps)
        kernels.rms_rope(k_SHd, table, k_weight, eps)

    return rms_rope


def load_rms_rope(name: str, device: torch.device) -> RmsRope:
    """The form of that name: "eager" anywhere, "kitchen" on CUDA (fp32 inside, one rounding),
    "triton" on CUDA with eager's roundings.

    ValueError lists the known names; Unavailable says why a kernel cannot run.
    """
    if name == "eager":
        return rms_rope_eager
    if name == "triton":
        return _triton(device)
    if name != "kitchen":
        raise ValueError(f"rms_rope must be one of {', '.join(RMS_ROPES)}, got {name!r}")
    if device.type != "cuda":
        raise Unavailable("kitchen", f"its kernel needs a CUDA device, got {device}")
    state = ck.list_backends().get("cuda", {})
    if not state.get("available", False):
        raise Unavailable("kitchen", f"comfy-kitchen's CUDA backend is off: {state}")
    return _rms_rope_kitchen
