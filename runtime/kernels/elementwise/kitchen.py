"""The eager form with comfy-kitchen's CUDA kernel for q/k norm and rotation: one rounding.

ComfyUI on a GPU with CUDA 13 computes the rotation like this (contract 1.14).
"""

from __future__ import annotations

import comfy_kitchen as ck
import torch
from torch import Tensor

from runtime.kernels.elementwise.base import ElementwiseBackend
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.elementwise.vae_eager import VaeEager
from runtime.kernels.unavailable import Unavailable


class Kitchen(Eager):
    """Eager but for the rotation."""

    def rms_rope(
        self,
        q_SHd: Tensor,
        k_SHd: Tensor,
        table_1S1R22: Tensor,
        q_weight_d: Tensor,
        k_weight_d: Tensor,
        eps: float,
    ) -> None:
        """One kernel for q and k."""
        rotated = 2 * table_1S1R22.shape[3]
        with ck.use_backend("cuda"):
            ck.rms_rope_split_half_(
                q_SHd[None], k_SHd[None], table_1S1R22, q_weight_d, k_weight_d, eps, rotated
            )


def _load(device: torch.device) -> Kitchen:
    if device.type != "cuda":
        raise Unavailable("kitchen", f"its kernel needs a CUDA device, got {device}")
    state = ck.list_backends().get("cuda", {})
    if not state.get("available", False):
        raise Unavailable("kitchen", f"comfy-kitchen's CUDA backend is off: {state}")
    return Kitchen()


BACKEND = ElementwiseBackend(
    name="kitchen",
    load=_load,
    load_vae=lambda device: VaeEager(),
    route=lambda device: (
        f"torch {torch.__version__}, rotation by comfy-kitchen's CUDA kernel; video VAE eager"
    ),
    requirement="a CUDA GPU that comfy-kitchen's CUDA backend supports",
    package="comfy-kitchen",
)
