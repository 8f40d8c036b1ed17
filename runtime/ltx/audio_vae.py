"""Audio latents to a stereo wave: diffusers' audio VAE decoder, then its vocoder, both in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints.load import LoadReport
from runtime.ltx.components import load_component
from runtime.ltx.folders import AUDIO_VAE, VOCODER, check_audio_vae, check_options
from runtime.ltx.packing import audio_latent, audio_tokens
from runtime.ltx.video_vae import never
from runtime.nonfinite import require_finite

DECODE_STAGE = "audio VAE decode"


class AudioDecoder:
    """Latents [1, 8, A, 16] to waves; the two modules stay on one device."""

    def __init__(self, vae: Any, vocoder: Any) -> None:
        """Modules of the classes and options that load_audio_decoder has checked."""
        self.vae, self.vocoder = vae, vocoder

    def denormalised(self, latent_B8A16: Tensor) -> Tensor:
        """To the VAE's own scale; its statistics are one per packed channel, (channel, bin)."""
        tokens_BAC = audio_tokens(latent_B8A16.float())
        return audio_latent(tokens_BAC * self.vae.latents_std + self.vae.latents_mean)

    def decode(self, latent_B8A16: Tensor, *, cancelled: Callable[[], bool] = never) -> Tensor:
        """Wave [1, 2, (4A-3)*480] fp32 in [-1, 1] on the CPU, at SAMPLE_RATE."""
        device = self.vae.latents_mean.device
        mel_BCTM = self.vae.decode(self.denormalised(latent_B8A16.to(device))).sample
        if cancelled():
            raise Cancelled
        wave_BCL: Tensor = self.vocoder(mel_BCTM)
        require_finite(wave_BCL, stage=DECODE_STAGE, tensor="the wave")
        return wave_BCL.cpu()


def load_audio_decoder(
    vae_folder: Path, vocoder_folder: Path, *, device: torch.device
) -> tuple[AudioDecoder, LoadReport]:
    """Both folders; the vocoder is the one with bandwidth extension to 48 kHz."""
    vae, vae_report = load_component(vae_folder, AUDIO_VAE, device=device, dtype=torch.float32)
    check_audio_vae(vae_folder, vae.config, vae.latents_mean.numel())
    vocoder, vocoder_report = load_component(
        vocoder_folder, VOCODER, device=device, dtype=torch.float32
    )
    check_options(vocoder_folder, VOCODER, vocoder.config)
    both = LoadReport(
        bytes=vae_report.bytes + vocoder_report.bytes,
        seconds=vae_report.seconds + vocoder_report.seconds,
    )
    return AudioDecoder(vae, vocoder), both
