"""The audio VAE: 32 kHz waves to latents at 40 per second and back, stereo as two mono items.

Axes: B waves (2 per stereo pair), C channels, L samples, T latents (800 samples each).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runtime.cancel import Cancelled
from runtime.checkpoints.base import Checkpoint, CheckpointError, PackedWeight
from runtime.checkpoints.load import LoadProgress, LoadReport, load_into
from runtime.h3.sizes import SAMPLES_PER_LATENT, resampled_length
from runtime.nonfinite import require_finite

ENCODE_STAGE = "audio VAE encode"
DECODE_STAGE = "audio VAE decode"

HEADS = 8
DILATIONS = (1, 3, 9)
AMP_DILATIONS = (1, 3, 5)
UP_STRIDES = (5, 5, 2, 2, 2, 2, 2)  # not visible in shapes: kernels 9 and 4 fit several strides

RESAMPLE_WIDTH = 6
RESAMPLE_ROLLOFF = 0.99

Shapes = Mapping[str, tuple[int, ...]]
IsCancelled = Callable[[], bool]


def never() -> bool:
    """The cancel check of a call that nobody can cancel."""
    return False


def _stop_if(cancelled: IsCancelled) -> None:
    if cancelled():
        raise Cancelled


def resample(wave_CL: Tensor, orig: int, new: int) -> Tensor:
    """Wave [..., L] at `orig` Hz to `new` Hz: Hann-windowed sinc, float32 (contract 0.1.11)."""
    if orig <= 0 or new <= 0:
        raise ValueError(f"a sample rate must be above 0 Hz, got {orig} and {new}")
    if orig == new:
        return wave_CL
    gcd = math.gcd(orig, new)
    orig, new = orig // gcd, new // gcd
    kernel, width = _sinc_kernel(orig, new, wave_CL.device)
    rows = wave_CL.reshape(-1, wave_CL.shape[-1])
    length = rows.shape[-1]
    rows = F.pad(rows, (width, width + orig))
    rows = F.conv1d(rows[:, None], kernel, stride=orig).transpose(1, 2).reshape(len(rows), -1)
    return rows[..., : resampled_length(length, orig, new)].reshape(*wave_CL.shape[:-1], -1)


def _sinc_kernel(orig: int, new: int, device: torch.device) -> tuple[Tensor, int]:
    """Kernel [new, 1, 2*width + orig] for coprime rates; a float64 build is 3e-5 off."""
    base = min(orig, new) * RESAMPLE_ROLLOFF
    width = math.ceil(RESAMPLE_WIDTH * orig / base)
    fp32 = torch.float32
    taps = torch.arange(-width, width + orig, dtype=fp32, device=device)[None, None] / orig
    phases = torch.arange(0, -new, -1, dtype=fp32, device=device)[:, None, None] / new
    t = ((phases + taps) * base).clamp(-RESAMPLE_WIDTH, RESAMPLE_WIDTH)
    window = torch.cos(t * math.pi / RESAMPLE_WIDTH / 2) ** 2
    t = t * math.pi
    sinc = torch.where(t == 0, torch.ones_like(t), t.sin() / t)
    return sinc * (window * (base / orig)), width


def loudness_guard(wave_CL: Tensor) -> Tensor:
    """Wave [1,C,L] divided by max(1, 5 std), std unbiased over channels and time (contract 7)."""
    std = torch.std(wave_CL, dim=[1, 2], keepdim=True) * 5.0
    return wave_CL / torch.where(std < 1.0, torch.ones_like(std), std)


def fit_stereo(wave_CL: Tensor) -> Tensor:
    """Wave [1,C,L] at 32 kHz -> [1,2,L'], L' a multiple of 800 cut from the middle (contract 7)."""
    length = wave_CL.shape[-1]
    kept = length // SAMPLES_PER_LATENT * SAMPLES_PER_LATENT
    if kept == 0:
        raise ValueError(
            f"an audio reference must last at least 25 ms (800 samples at 32 kHz), got {length} "
            f"samples; use a longer sound or none"
        )
    start = (length - kept) // 2
    wave_CL = wave_CL[..., start : start + kept]
    return wave_CL.expand(-1, 2, -1) if wave_CL.shape[1] == 1 else wave_CL[:, :2]


class Snake(nn.Module):
    """x + sin(a x)^2 / a per channel, alpha [1,C,1] stored linearly."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1, channels, 1))

    def forward(self, x_BCL: Tensor) -> Tensor:
        return snake(x_BCL, self.alpha, self.alpha)


class SnakeBeta(nn.Module):
    """x + sin(a x)^2 / b per channel, alpha and beta [C] stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def forward(self, x_BCL: Tensor) -> Tensor:
        alpha, beta = (p[None, :, None].exp() for p in (self.alpha, self.beta))
        return snake(x_BCL, alpha, beta)


def snake(x_BCL: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """x + sin(alpha x)^2 / (beta + 1e-9)."""
    return x_BCL + torch.sin(alpha * x_BCL).pow(2) * (1.0 / (beta + 1e-9))


class Filter(nn.Module):
    """Holds one 12-tap kaiser-sinc filter [1,1,12], a constant kept in the checkpoint."""

    filter: Tensor

    def __init__(self, taps: int) -> None:
        super().__init__()
        self.register_buffer("filter", torch.empty(1, 1, taps))

    def per_channel(self, channels: int) -> Tensor:
        """The filter repeated for a grouped convolution: [channels,1,12]."""
        return self.filter.expand(channels, -1, -1)


class Upsample(Filter):
    """[B,C,L] -> [B,C,2L] without aliases."""

    def forward(self, x_BCL: Tensor) -> Tensor:
        channels = x_BCL.shape[1]
        x = F.pad(x_BCL, (5, 5), mode="replicate")
        x = 2 * F.conv_transpose1d(x, self.per_channel(channels), stride=2, groups=channels)
        return x[..., 15:-15]


class Downsample(nn.Module):
    """[B,C,2L] -> [B,C,L] without aliases."""

    def __init__(self, taps: int) -> None:
        super().__init__()
        self.lowpass = Filter(taps)

    def forward(self, x_BCL: Tensor) -> Tensor:
        channels = x_BCL.shape[1]
        x = F.pad(x_BCL, (5, 6), mode="replicate")
        return F.conv1d(x, self.lowpass.per_channel(channels), stride=2, groups=channels)


class Activation(nn.Module):
    """SnakeBeta evaluated at twice the rate, so that its harmonics do not fold back."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.act = SnakeBeta(channels)
        self.upsample = Upsample(taps)
        self.downsample = Downsample(taps)

    def forward(self, x_BCL: Tensor) -> Tensor:
        return self.downsample(self.act(self.upsample(x_BCL)))


class ResidualUnit(nn.Module):
    """y + x with y = conv1(snake(conv7 dilated(snake(x))))."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(channels),
            nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation),
            Snake(channels),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x_BCL: Tensor) -> Tensor:
        return self.block(x_BCL) + x_BCL


class EncoderStage(nn.Module):
    """Three residual units, then a strided convolution (kernel 2*stride)."""

    def __init__(self, channels: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            *(ResidualUnit(channels, dilation) for dilation in DILATIONS),
            Snake(channels),
            nn.Conv1d(
                channels, channels_out, 2 * stride, stride=stride, padding=math.ceil(stride / 2)
            ),
        )

    def forward(self, x_BCL: Tensor) -> Tensor:
        return self.block(x_BCL)


class Encoder(nn.Module):
    """Wave [B,1,L] -> features [B,C,L/800]."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        first, last = shapes["encoder.block.0.weight"], shapes["encoder.block.7.weight"]
        self.block = nn.Sequential(
            nn.Conv1d(1, first[0], 7, padding=3),
            *(self._stage(shapes[f"encoder.block.{i}.block.4.weight"]) for i in range(1, 6)),
            Snake(last[1]),
            nn.Conv1d(last[1], last[0], 3, padding=1),
        )

    @staticmethod
    def _stage(down: tuple[int, ...]) -> EncoderStage:
        return EncoderStage(down[1], down[0], down[2] // 2)

    def forward(self, x_BCL: Tensor, cancelled: IsCancelled) -> Tensor:
        for stage in self.block:
            _stop_if(cancelled)
            x_BCL = stage(x_BCL)
        return x_BCL


class Attention(nn.Module):
    """Causal attention over time whose heads are averaged, then pooled to the latent width."""

    def __init__(self, width: int, width_out: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.empty(width))
        self.zero_k_bias = nn.Parameter(torch.empty(width))
        self.v_bias = nn.Parameter(torch.empty(width))
        self.proj = nn.Linear(width_out, width_out)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, time, width = x_BTC.shape
        bias = torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        qkv = F.linear(x_BTC, self.qkv.weight, bias)
        q, k, v = qkv.reshape(batch, time, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        pooled = F.adaptive_avg_pool1d(heads.mean(dim=1), self.proj.in_features)
        return self.proj(pooled)


class MLP(nn.Module):
    """w2(gelu_tanh(w0 y) * w1 y) of the normalised input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.w0 = nn.Linear(width, hidden)
        self.w1 = nn.Linear(width, hidden)
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y = self.norm(x_BTC)
        return self.w2(F.gelu(self.w0(y), approximate="tanh") * self.w1(y))


class PreBlock(nn.Module):
    """The transformer block between the encoder and the latent: [B,T,C] -> [B,T,32]."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        width_out, width = shapes["pre_block.proj.weight"]
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = Attention(width, width_out)
        self.norm2 = nn.LayerNorm(width_out, eps=1e-5)
        self.norm3 = nn.LayerNorm(width, eps=1e-5)
        self.proj = nn.Linear(width, width_out)
        self.mlp = MLP(width_out, shapes["pre_block.mlp.w0.weight"][0])

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = self.proj(self.norm3(x_BTC)) + self.attn(self.norm1(x_BTC))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class AMPBlock(nn.Module):
    """Three dilated residual convolutions with anti-aliased activations."""

    def __init__(self, channels: int, kernel: int, taps: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_same_conv(channels, kernel, d) for d in AMP_DILATIONS)
        self.convs2 = nn.ModuleList(_same_conv(channels, kernel, 1) for _ in AMP_DILATIONS)
        self.activations = nn.ModuleList(
            Activation(channels, taps) for _ in range(2 * len(AMP_DILATIONS))
        )

    def forward(self, x_BCL: Tensor) -> Tensor:
        acts = self.activations
        for i, (conv1, conv2) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            t = conv1(acts[2 * i](x_BCL))
            t = conv2(acts[2 * i + 1](t))
            x_BCL = t + x_BCL
        return x_BCL


def _same_conv(channels: int, kernel: int, dilation: int) -> nn.Conv1d:
    padding = (kernel * dilation - dilation) // 2
    return nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=padding)


class Decoder(nn.Module):
    """Features [B,C,T] -> wave [B,1,800 T] in [-1,1]."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        conv_pre, conv_post = shapes["decoder.conv_pre.weight"], shapes["decoder.conv_post.weight"]
        taps = shapes["decoder.activation_post.upsample.filter"][-1]
        self.conv_pre = nn.Conv1d(conv_pre[1], conv_pre[0], 7, padding=3)
        self.ups = nn.ModuleList()
        self.resblocks = nn.ModuleList()
        for i, stride in enumerate(UP_STRIDES):
            cin, cout, kernel = shapes[f"decoder.ups.{i}.0.weight"]
            up = nn.ConvTranspose1d(cin, cout, kernel, stride, padding=(kernel - stride) // 2)
            self.ups.append(nn.Sequential(up))
            for j in range(3):
                kernel = shapes[f"decoder.resblocks.{3 * i + j}.convs1.0.weight"][-1]
                self.resblocks.append(AMPBlock(cout, kernel, taps))
        self.activation_post = Activation(conv_post[1], taps)
        self.conv_post = nn.Conv1d(conv_post[1], 1, 7, padding=3, bias=False)

    def forward(self, x_BCT: Tensor, cancelled: IsCancelled) -> Tensor:
        x = self.conv_pre(x_BCT)
        for stage in range(len(self.ups)):
            _stop_if(cancelled)
            x = self.mix(stage, self.ups[stage](x))
        _stop_if(cancelled)
        return self.finish(self.activation_post(x))

    def finish(self, x_BCL: Tensor) -> Tensor:
        """The last convolution and the clamp to [-1,1]."""
        return torch.clamp(self.conv_post(x_BCL), -1.0, 1.0)

    def mix(self, stage: int, x_BCL: Tensor) -> Tensor:
        """Mean of the three AMP blocks of a stage."""
        total = self.resblocks[3 * stage](x_BCL)
        for j in (1, 2):
            total = total + self.resblocks[3 * stage + j](x_BCL)
        return total / 3


class AudioVAE(nn.Module):
    """The whole VAE; parameter and buffer names are the checkpoint's keys (917 tensors).

    float32 only (contract 7). On CUDA, cuDNN convolutions use TF32 where the process allows it
    (`torch.backends.cudnn.allow_tf32`, ComfyUI's default); this file does not touch that switch.
    """

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        channels = shapes["mean_proj.weight"][0]
        self.encoder = Encoder(shapes)
        self.pre_block = PreBlock(shapes)
        self.mean_proj = nn.Conv1d(channels, channels, 1)
        self.logs_proj = nn.Conv1d(channels, channels, 1)  # in the file, never used
        self.dec_in_proj = nn.Conv1d(channels, shapes["dec_in_proj.weight"][0], 1)
        self.decoder = Decoder(shapes)
        self.register_buffer("latents_mean", torch.empty(channels))
        self.register_buffer("latents_std", torch.empty(channels))

    @torch.no_grad()
    def encode(self, wave_CL: Tensor, *, cancelled: IsCancelled = never) -> Tensor:
        """Wave [1,C,L] fp32 at 32 kHz -> normalised latent [1,32,2,T], T = L // 800, own device.

        Mono is replicated, channels beyond two are cut, L is cut from the middle to a multiple of
        800. Raises Cancelled before the next stage once `cancelled()` is true, NonFinite, and
        ValueError for less than 800 samples. Contract 7.
        """
        wave = fit_stereo(wave_CL).to(self.latents_mean.device, torch.float32)
        pairs = wave.reshape(2 * wave.shape[0], 1, wave.shape[-1])
        features_BCT = self.encoder(pairs, cancelled)
        mean_BCT = self.mean_proj(self.pre_block(features_BCT.transpose(1, 2)).transpose(1, 2))
        require_finite(mean_BCT, stage=ENCODE_STAGE, tensor="latent mean")
        return self.normalised(mean_BCT)

    @torch.no_grad()
    def decode(self, latent: Tensor, *, cancelled: IsCancelled = never) -> Tensor:
        """Normalised latent [1,32,2,T] -> raw wave [1,2,800 T] fp32 in [-1,1] at 32 kHz.

        The loudness guard is not applied. Raises Cancelled before the next stage once `cancelled()`
        is true, NonFinite on a broken result. Contract 7.
        """
        wave_B1L = self.decoder(self.dec_in_proj(self.denormalised(latent)), cancelled)
        require_finite(wave_B1L, stage=DECODE_STAGE, tensor="wave")
        return wave_B1L.reshape(-1, 2, wave_B1L.shape[-1])

    def normalised(self, mean_BCT: Tensor) -> Tensor:
        """Means [2,32,T], one row per stereo channel -> latent [1,32,2,T]."""
        z = (mean_BCT - self.latents_mean[:, None]) / self.latents_std[:, None]
        return z.reshape(-1, 2, *z.shape[1:]).transpose(1, 2).contiguous()

    def denormalised(self, latent: Tensor) -> Tensor:
        """Latent [1,32,2,T] -> means [2,32,T] on the weights' device."""
        z = latent.to(self.latents_mean.device, torch.float32).transpose(1, 2)
        z_BCT = z.reshape(-1, *z.shape[2:])
        return z_BCT * self.latents_std[:, None] + self.latents_mean[:, None]


def build_audio_vae(checkpoint: Checkpoint) -> AudioVAE:
    """The VAE on the meta device, as wide as the checkpoint's tensors; load it strictly next.

    Raises CheckpointError if the file is not an H3 audio VAE or is not stored in float32.
    """
    names = checkpoint.names()
    if "pre_block.attn.zero_k_bias" not in names:
        raise CheckpointError(
            "the file is no H3 audio VAE (pre_block.attn.zero_k_bias is missing); "
            "use minimax_h3_audio_vae_fp32.safetensors"
        )
    other = sorted(n for n in names if checkpoint.dtype(n) != torch.float32)
    if other:
        raise CheckpointError(
            f"the audio VAE runs in float32 only, but {other[0]} is {checkpoint.dtype(other[0])} "
            f"({len(other)} such tensors); use the fp32 file"
        )
    shapes = {name: checkpoint.shape(name) for name in names}
    try:
        with torch.device("meta"):
            return AudioVAE(shapes).requires_grad_(False).eval()
    except KeyError as missing:
        raise CheckpointError(f"the audio VAE file lacks the tensor {missing}") from missing


def load_audio_vae(
    checkpoint: Checkpoint, *, device: torch.device, progress: LoadProgress | None = None
) -> tuple[AudioVAE, LoadReport]:
    """The VAE of an open checkpoint, on `device`, float32 as stored; CheckpointError as above."""
    vae = build_audio_vae(checkpoint)
    report = load_into(
        vae,
        checkpoint,
        device=device,
        dtype_of=lambda name, stored: stored,
        build_linear=_no_packed_layer,
        progress=progress,
    )
    return vae, report


def _no_packed_layer(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
    raise CheckpointError(
        f"the audio VAE's layer {packed.layer} is quantised; only fp32 files are known"
    )
