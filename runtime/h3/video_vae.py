"""The video VAE of H3: frames to normalised latents and back, in clips and 256-pixel tiles.

Axes: B batch (always 1), C channels, T latents or frames, F frames, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from runtime.cancel import Cancelled
from runtime.checkpoints.base import Checkpoint, CheckpointError
from runtime.checkpoints.load import LoadProgress, LoadReport, load_into
from runtime.h3.video_decode import (
    CHUNKS_AHEAD,
    Chunk,
    RawClips,
    Watch,
    in_flight,
    to_bytes,
)
from runtime.h3.video_decoder import HEAD_WIDTH, VideoDecoder, joined
from runtime.h3.video_encoder import SPACE_STRIDES, VideoEncoder
from runtime.h3.video_ranks import Conductor, Timed
from runtime.h3.video_tiles import (
    CLIP_FRAMES,
    DROPPED_TOKENS,
    PIXELS_PER_TOKEN,
    Split,
    Tap,
    join_tiles,
    num_padding_tokens,
    split,
    tapped,
    whole,
)
from runtime.kernels.attention import Attend, AttentionOptions, attention_backend, load_attention
from runtime.kernels.elementwise import VaeElementwise, load_vae
from runtime.kernels.linear import linear_builder
from runtime.kernels.unavailable import Unavailable
from runtime.nonfinite import require_finite
from runtime.team import Team

ENCODE_STAGE = "video VAE encode"
PIXEL_MEAN = (0.485, 0.456, 0.406)  # ImageNet
PIXEL_STD = (0.229, 0.224, 0.225)


def never() -> bool:
    """The cancel check of a call that nobody can cancel."""
    return False


def unreported(done: int, total: int) -> None:
    """The progress callback of a call that nobody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoVaeConfig:
    """The sizes that the checkpoint's shapes give; strides and tiles are constants of the model."""

    channels: tuple[int, ...]  # of the encoder levels
    moments: int
    latent_channels: int
    hidden: int
    inner: int
    depth: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> VideoVaeConfig:
        """Read the sizes; CheckpointError when a tensor that carries one is missing."""
        names = set(checkpoint.names())
        channels: list[int] = []
        while (name := f"encoder.down.{len(channels)}.block.0.conv1.weight") in names:
            channels.append(checkpoint.shape(name)[0])
        if len(channels) != len(SPACE_STRIDES):
            raise CheckpointError(
                f"a video VAE has {len(SPACE_STRIDES)} encoder levels, "
                f"this file has {len(channels)}"
            )
        depth = 0
        while f"decoder.transformer_blocks.{depth}.scale1" in names:
            depth += 1
        needed = (
            "decoder.x_embedder.weight",
            "quant_conv.weight",
            "decoder.transformer_blocks.0.ff.w2.weight",
        )
        if missing := [name for name in needed if name not in names]:
            raise CheckpointError(f"this file is no video VAE: it lacks {', '.join(missing)}")
        hidden, latent_channels = checkpoint.shape("decoder.x_embedder.weight")
        return cls(
            channels=tuple(channels),
            moments=checkpoint.shape("quant_conv.weight")[0],
            latent_channels=latent_channels,
            hidden=hidden,
            inner=checkpoint.shape("decoder.transformer_blocks.0.ff.w2.weight")[1],
            depth=depth,
        )


class VideoVAE(nn.Module):
    """Encoder, ViT decoder and what joins their clips (contract 6); parameters named as stored."""

    latents_mean: Tensor
    latents_std: Tensor
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self, config: VideoVaeConfig, attend: Attend, ops: VaeElementwise, *, tiles: int = 1
    ) -> None:
        """tiles: of the decoder, in one batch."""
        super().__init__()
        self.config = config
        self.tiles = tiles
        channels, moments = config.latent_channels, config.moments
        self.encoder = VideoEncoder(channels=config.channels, moments=moments)
        self.decoder = VideoDecoder(
            latent_channels=channels,
            hidden=config.hidden,
            inner=config.inner,
            depth=config.depth,
            attend=attend,
            ops=ops,
        )
        self.quant_conv = nn.Conv3d(moments, moments, 1, device="meta")
        self.post_quant_conv = nn.Conv3d(channels, channels, 1, device="meta")
        self.register_buffer("latents_mean", torch.empty(channels, device="meta"))
        self.register_buffer("latents_std", torch.empty(channels, device="meta"))
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.latents_mean.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, also of the buffers (contract 6.6)."""
        return self.latents_mean.dtype

    # ---- decode

    def decode(
        self,
        latent: Tensor,
        *,
        cancelled: Callable[[], bool] = never,
        on_tile: Callable[[int, int], None] = unreported,
        on_tap: Tap | None = None,
        tiling: bool = True,
    ) -> Tensor:
        """The whole clip [F,H,W,3] float32 in [0,1] on the CPU; see `decode_stream`."""
        chunks = self.decode_stream(
            latent, cancelled=cancelled, on_tile=on_tile, on_tap=on_tap, tiling=tiling
        )
        return torch.cat(list(chunks))

    def decode_stream(
        self,
        latent: Tensor,
        *,
        as_bytes: bool = False,
        cancelled: Callable[[], bool] = never,
        on_tile: Callable[[int, int], None] = unreported,
        on_tap: Tap | None = None,
        tiling: bool = True,
        conductor: Conductor | None = None,
    ) -> Iterator[Tensor]:
        """Finished frames [n,H,W,3], float32 in [0,1] on the CPU, in order (contract 6.4-6.6).

        latent: normalised [1,24,T,h,w]. A chunk is final when yielded: 17 frames each, then the
        rest. as_bytes: uint8, rounded on the device; on a GPU in pinned memory, and the next chunk
        is launched before one is waited for. on_tile(done, total) follows each tile that was
        launched. tiling=False exists for parity only. conductor: of the ranks that decode with this
        one, each in `help_decode`. Raises ValueError for another shape,
        Cancelled before the next batch of `tiles` once `cancelled()` is true, NonFinite naming the
        stage.
        """
        self._check_latent(latent)
        watch = Watch(cancelled=cancelled, on_tile=on_tile, on_tap=on_tap)
        return self._decode_chunks(latent, watch, split if tiling else whole, as_bytes, conductor)

    @torch.no_grad()
    def help_decode(self, latent: Tensor, team: Team, timed: Timed) -> None:
        """This rank's share of rank 0's `decode_stream` of the same latent; timed: each batch."""
        self._check_latent(latent)
        watch = Watch(cancelled=never, on_tile=unreported, on_tap=None)
        self._clips(latent, watch, split, None).help_out(team, timed)

    @torch.no_grad()
    def _decode_chunks(
        self,
        latent: Tensor,
        watch: Watch,
        cut: Callable[[int], Split],
        as_bytes: bool,
        conductor: Conductor | None,
    ) -> Iterator[Tensor]:
        clips = self._clips(latent, watch, cut, conductor)
        ahead = CHUNKS_AHEAD if as_bytes and self.device.type == "cuda" else 0
        yield from in_flight(clips.joined(), partial(self._start, as_bytes=as_bytes), ahead)

    def _clips(
        self,
        latent: Tensor,
        watch: Watch,
        cut: Callable[[int], Split],
        conductor: Conductor | None,
    ) -> RawClips:
        return RawClips(
            self._decode_tiles,
            self._padded(latent),
            latent.shape[2],
            cut=cut,
            at_once=self.tiles,
            watch=watch,
            conductor=conductor,
        )

    def _padded(self, latent: Tensor) -> Tensor:
        """Latents as the decoder takes them: denormalised, the last one repeated at the end."""
        z = latent.to(self.device, self.dtype)
        z = z * _channels(self.latents_std) + _channels(self.latents_mean)
        if latent.shape[2] > 1:
            padding = num_padding_tokens(latent.shape[2])
            z = torch.cat((z, z[:, :, -1:].expand(-1, -1, padding, -1, -1)), dim=2)
        return z

    def _decode_tiles(self, z_BCthw: Tensor, on_tap: Tap | None) -> Tensor:
        """Raw tiles; the convolution runs tile by tile: another batch may choose another kernel."""
        latents = joined([self.post_quant_conv(z) for z in z_BCthw.split(1)])
        tapped(on_tap, "mod/post_quant_conv", latents)
        raw: Tensor = self.decoder(latents, on_tap)
        return raw

    def to_frames(self, raw_BCFHW: Tensor) -> Tensor:
        """Raw pixels to float32 frames [F,H,W,3] in [0,1] on the CPU, in memory of their own."""
        return self._start(raw_BCFHW, as_bytes=False).wait()

    def _start(self, raw_BCFHW: Tensor, *, as_bytes: bool) -> Chunk:
        finite = torch.isfinite(raw_BCFHW).all()
        std, mean = (x.float().view(1, 3, 1, 1, 1) for x in (self.pixel_std, self.pixel_mean))
        frames = (raw_BCFHW.float() * std + mean).clamp(0.0, 1.0)
        frames = frames[0].permute(1, 2, 3, 0)
        return Chunk((to_bytes(frames) if as_bytes else frames).contiguous(), finite)

    def _check_latent(self, latent: Tensor) -> None:
        channels = self.config.latent_channels
        if latent.dim() != 5 or latent.shape[:2] != (1, channels) or latent.numel() == 0:
            raise ValueError(
                f"a video latent must be [1, {channels}, T, h, w], got {list(latent.shape)}; "
                "pass the sampler's video output"
            )

    # ---- encode

    @torch.no_grad()
    def encode(
        self,
        frames: Tensor,
        *,
        cancelled: Callable[[], bool] = never,
        on_tile: Callable[[int, int], None] = unreported,
        on_tap: Tap | None = None,
    ) -> Tensor:
        """Frames [F,H,W,3], floats in [0,1] -> normalised latent [1,24,T,h,w], float32.

        The latent stays on the VAE's device. Sides are centre-cropped to multiples of 16;
        F = 17k + 5 gives T = 5k + 2, F = 1 gives 1 (contract 6.3). Raises ValueError for frames of
        another form, Cancelled and NonFinite as `decode_stream` does.
        """
        frames = _cropped(frames)
        num, height, width = frames.shape[:3]
        rows, columns = split(height), split(width)
        starts = range(0, num, CLIP_FRAMES)
        total = len(starts) * len(rows) * len(columns)
        latents = []
        done = 0
        for start in starts:
            pixels = self._clip_pixels(frames[start : start + CLIP_FRAMES], single=num == 1)

            def tile(y: slice, x: slice, pixels: Tensor = pixels) -> Tensor:
                nonlocal done
                if cancelled():
                    raise Cancelled
                tap = on_tap if done == 0 else None
                moments = self.quant_conv(self.encoder(pixels[..., y, x], tap))
                tapped(tap, "mod/quant_conv", moments)
                done += 1
                on_tile(done, total)
                return moments

            latents.append(join_tiles(tile, rows, columns, PIXELS_PER_TOKEN))
        moments = torch.cat(latents, dim=2)
        return self.to_latent(moments[:, :, -1:] if num == 1 else moments[:, :, :-DROPPED_TOKENS])

    def to_latent(self, moments_BCThw: Tensor) -> Tensor:
        """The mean half of mean | log-variance, normalised in float32 by the buffers as stored."""
        mean = moments_BCThw[:, : self.config.latent_channels].float()
        require_finite(mean, stage=ENCODE_STAGE, tensor="latent mean")
        return (mean - _channels(self.latents_mean.float())) / _channels(self.latents_std.float())

    def _clip_pixels(self, frames_FHWC: Tensor, *, single: bool) -> Tensor:
        """One clip [1,3,17,H,W], ImageNet-normalised op by op in the VAE's dtype."""
        x = frames_FHWC.to(self.device).permute(3, 0, 1, 2).unsqueeze(0)
        x = (x * 2.0 - 1.0).to(self.dtype)
        short = 0 if single else CLIP_FRAMES - x.shape[2]
        if short:
            x = torch.cat((x, x[:, :, -1:].expand(-1, -1, short, -1, -1)), dim=2)
        x = ((x + 1) * 0.5 - _channels(self.pixel_mean)) / _channels(self.pixel_std)
        return x


def _channels(x_C: Tensor) -> Tensor:
    return x_C.view(1, -1, 1, 1, 1)


def _cropped(frames: Tensor) -> Tensor:
    """The centre of the frames whose sides are multiples of 16."""
    if frames.dim() != 4 or frames.shape[-1] != 3 or frames.shape[0] == 0:
        raise ValueError(
            f"frames must be [F, H, W, 3] with at least one frame, got {list(frames.shape)}"
        )
    if not frames.is_floating_point():
        raise ValueError(
            f"frames must be floats in [0, 1], got {frames.dtype}; divide bytes by 255"
        )
    height, width = frames.shape[1:3]
    new_height, new_width = (n // PIXELS_PER_TOKEN * PIXELS_PER_TOKEN for n in (height, width))
    if not new_height or not new_width:
        raise ValueError(f"frames must be at least 16x16 pixels, got {width}x{height}")
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return frames[:, top : top + new_height, left : left + new_width]


def load_vae_attention(
    name: str, device: torch.device, dtype: torch.dtype, options: AttentionOptions
) -> Attend:
    """The named attention for the decoder's heads; Unavailable, before anything is decoded."""
    if (multiple := attention_backend(name).rows_multiple) > 1:
        raise Unavailable(
            name,
            f"it takes multiples of {multiple} rows, and the video VAE's tiles have any number; "
            f"choose vae_attention sdpa",
        )
    return load_attention(name, device, dtype, options, head_dim=HEAD_WIDTH)


def load_video_vae(
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attend: Attend,
    int8: str = "int8_convrot",
    elementwise: str = "eager",
    tiles: int = 1,
    progress: LoadProgress | None = None,
) -> tuple[VideoVAE, LoadReport]:
    """The VAE of an open checkpoint, on `device`, computing in float32 or float16 (contract 6.6).

    float16 rounds the buffers too. int8: the linear backend of quantised decoder layers.
    elementwise: how the decoder's other steps run. tiles: decoded in one batch. Raises
    CheckpointError for a file of another model and Unavailable when the device cannot run a layer.
    """
    ops = load_vae(elementwise, device)
    vae = VideoVAE(VideoVaeConfig.of(checkpoint), attend, ops, tiles=tiles)
    report = load_into(
        vae,
        checkpoint,
        device=device,
        dtype_of=lambda name, stored: dtype,
        build_linear=linear_builder({"int8_tensorwise": int8}, checkpoint.layers, device),
        progress=progress,
    )
    vae.pixel_mean = vae.pixel_mean.to(device, dtype)
    vae.pixel_std = vae.pixel_std.to(device, dtype)
    vae.decoder.inv_freq = vae.decoder.inv_freq.to(device, dtype)
    return vae.eval().requires_grad_(False), report
