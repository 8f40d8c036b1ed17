"""The convolutional video VAE, as diffusers computes it: frames to normalised latents and back.

Axes: B batch (1), C channels, F frames or latent frames, H W pixels, h w latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.cancel import Cancelled
from runtime.checkpoints.load import LoadReport
from runtime.ltx.components import load_component
from runtime.ltx.folders import VIDEO_VAE, check_video_vae
from runtime.ltx.sizes import FRAMES_PER_LATENT, PIXELS_PER_LATENT
from runtime.nonfinite import require_finite

ENCODE_STAGE = "video VAE encode"
DECODE_STAGE = "video VAE decode"
CHUNK_FRAMES = 16  # frames that leave the device together
BYTE_MAX = 255


def never() -> bool:
    """The cancel check of a call that nobody can cancel."""
    return False


def unreported(done: int, total: int) -> None:
    """The progress callback of a call that nobody watches."""


class VideoVAE:
    """Encoder and decoder of one folder, on one device in one dtype."""

    def __init__(self, module: Any) -> None:
        """module: diffusers' AutoencoderKLLTX2Video, whose options load_video_vae has checked."""
        self.module = module
        self.latent_channels = int(module.config.latent_channels)
        shape = (1, -1, 1, 1, 1)
        self.mean_1C111 = module.latents_mean.float().reshape(shape)
        self.std_1C111 = module.latents_std.float().reshape(shape)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.module.device
        return device

    def normalised(self, latent_BCFhw: Tensor) -> Tensor:
        """What the encoder gives, per channel to the scale that the denoiser knows; fp32."""
        return (latent_BCFhw.float() - self.mean_1C111) / self.std_1C111

    def denormalised(self, latent_BCFhw: Tensor) -> Tensor:
        """The way back, fp32."""
        return latent_BCFhw.float() * self.std_1C111 + self.mean_1C111

    def encode(self, frames_FHWC: Tensor, *, cancelled: Callable[[], bool] = never) -> Tensor:
        """Frames [8k+1, H, W, 3] fp32 in [0, 1] to normalised latents [1, C, k+1, h, w] fp32.

        The mean of the distribution, no draw. ValueError for sizes that have no latents.
        """
        frames, height, width, _ = frames_FHWC.shape
        if (
            frames % FRAMES_PER_LATENT != 1
            or height % PIXELS_PER_LATENT
            or width % PIXELS_PER_LATENT
        ):
            raise ValueError(
                f"the video VAE encodes 8k+1 frames in multiples of {PIXELS_PER_LATENT} pixels, "
                f"got {frames} of {width}x{height}"
            )
        pixels_1CFHW = frames_FHWC.permute(3, 0, 1, 2)[None].to(self.device)
        pixels_1CFHW = (pixels_1CFHW * 2.0 - 1.0).to(self.module.dtype)
        encoder = self.module.encoder
        with _between([*encoder.down_blocks, encoder.mid_block], cancelled, unreported):
            latent = self.module.encode(pixels_1CFHW).latent_dist.mode()
        require_finite(latent, stage=ENCODE_STAGE, tensor="the latent")
        return self.normalised(latent)

    def decode_stream(
        self,
        latent_BCFhw: Tensor,
        *,
        as_bytes: bool,
        cancelled: Callable[[], bool] = never,
        on_part: Callable[[int, int], None] = unreported,
    ) -> Iterator[Tensor]:
        """Chunks [n, H, W, 3] on the CPU: uint8 rounded half up, or fp32 in [0, 1].

        All frames are computed at once, since diffusers' pieces are blended and not exact;
        `on_part`(done, total) is told of the decoder's blocks, between which a request can stop.
        """
        decoder = self.module.decoder
        blocks = [decoder.mid_block, *decoder.up_blocks]
        z = self.denormalised(latent_BCFhw.to(self.device)).to(self.module.dtype)
        with _between(blocks, cancelled, on_part):
            raw_1CFHW = self.module.decode(z).sample
        require_finite(raw_1CFHW, stage=DECODE_STAGE, tensor="raw pixels")
        on_part(len(blocks), len(blocks))
        for start in range(0, raw_1CFHW.shape[2], CHUNK_FRAMES):
            if cancelled():
                raise Cancelled
            chunk = raw_1CFHW[0, :, start : start + CHUNK_FRAMES].permute(1, 2, 3, 0).float()
            frames = (chunk * 0.5 + 0.5).clamp(0, 1)
            if as_bytes:
                frames = frames.mul_(BYTE_MAX).add_(0.5).to(torch.uint8)
            yield frames.cpu().contiguous()


def load_video_vae(
    folder: Path, *, channels: int, device: torch.device, dtype: torch.dtype
) -> tuple[VideoVAE, LoadReport]:
    """The VAE of a folder; `channels` are the denoiser's. CheckpointError as load_component."""
    module, report = load_component(folder, VIDEO_VAE, device=device, dtype=dtype)
    check_video_vae(folder, module.config, channels)
    return VideoVAE(module), report


@contextmanager
def _between(
    blocks: Sequence[nn.Module], cancelled: Callable[[], bool], on_part: Callable[[int, int], None]
) -> Iterator[None]:
    """While inside, every block first tells `on_part` its number and lets the user stop."""

    def hook(number: int) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, args: Any) -> None:
            del module, args
            if cancelled():
                raise Cancelled
            on_part(number, len(blocks))

        return before

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            handle = block.register_forward_pre_hook(hook(number))
            stack.callback(handle.remove)
        yield
