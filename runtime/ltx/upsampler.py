"""The latent upsampler between the two stages: twice the height and width, as diffusers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoints.load import LoadReport
from runtime.ltx.components import load_component
from runtime.ltx.folders import UPSAMPLER, check_upsampler
from runtime.ltx.video_vae import VideoVAE
from runtime.nonfinite import require_finite

STAGE = "latent upsampling"


class Upsampler:
    """Works on the VAE's own scale, which is why it needs the VAE's statistics."""

    def __init__(self, module: Any, vae: VideoVAE) -> None:
        """module: diffusers' LTX2LatentUpsamplerModel, as load_upsampler has checked it."""
        self.module, self.vae = module, vae

    def double(self, latent_BCFhw: Tensor) -> Tensor:
        """Normalised latents [B, C, F, h, w] to [B, C, F, 2h, 2w] fp32 on the VAE's device."""
        z = self.vae.denormalised(latent_BCFhw.to(self.vae.device))
        doubled = self.module(z.to(self.module.dtype))
        require_finite(doubled, stage=STAGE, tensor="the latent")
        return self.vae.normalised(doubled)


def load_upsampler(
    folder: Path, vae: VideoVAE, *, dtype: torch.dtype
) -> tuple[Upsampler, LoadReport]:
    """The spatial x2 upsampler of a folder, on the VAE's device."""
    module, report = load_component(folder, UPSAMPLER, device=vae.device, dtype=dtype)
    check_upsampler(folder, module.config, vae.latent_channels)
    return Upsampler(module, vae), report
