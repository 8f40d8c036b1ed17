"""What becomes of finished latents: a file of them, frames and a wave, an mp4.

Axes: F latent frames, h w latents, A audio latents, C channels, L samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.clock import AUDIO_VAE_DECODE, MUX, VIDEO_VAE_DECODE
from runtime.job import Job
from runtime.ltx.audio_vae import AudioDecoder
from runtime.ltx.folders import SAMPLE_RATE
from runtime.ltx.recipe import Latents
from runtime.ltx.sizes import LATENTS_KEY, latents_form
from runtime.ltx.video_vae import VideoVAE
from runtime.media.frames import write_frames
from runtime.media.tensors import read_pair, write_safetensors_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Both decoders. tags: of every mp4, besides its record."""

    video_vae: VideoVAE
    audio: AudioDecoder
    tags: Mapping[str, str]

    def mp4(
        self, latents: Latents, fps: int, path: Path, record: Mapping[str, Any], job: Job
    ) -> None:
        """Writes the mp4; needs PyAV."""
        from runtime.media.mp4 import Mp4Options, write_mp4  # a machine without it has no mp4

        frames = self._frames(latents.video, job, as_bytes=True)
        with job.clock.stage(MUX, exclusive=True):
            written = write_mp4(
                path,
                frames,
                lambda: self._wave(latents, fps, job)[0],
                record,
                Mp4Options(fps=fps, sample_rate=SAMPLE_RATE),
                job.check,
                tags=self.tags,
            )
        for note in written.notes:
            job.note(note)

    def files(self, latents: Latents, fps: int, out: Path, job: Job) -> None:
        """Float frames in out/frames and the wave, where no mp4 is wanted."""
        with job.clock.stage(MUX, exclusive=True):
            write_frames(out / "frames", self._frames(latents.video, job, as_bytes=False))
        wave = self._wave(latents, fps, job)
        rate = {"rate": str(SAMPLE_RATE)}
        write_safetensors_atomic(out / "audio.safetensors", {"wave": wave}, rate)

    def _frames(self, latent: Tensor, job: Job, *, as_bytes: bool) -> Iterator[Tensor]:
        """Chunks of finished frames; only the decoding counts as the VAE's time."""
        chunks = self.video_vae.decode_stream(
            latent,
            as_bytes=as_bytes,
            cancelled=job.cancelled,
            on_part=partial(job.progress, VIDEO_VAE_DECODE),
        )
        return job.clock.each(VIDEO_VAE_DECODE, chunks)

    def _wave(self, latents: Latents, fps: int, job: Job) -> Tensor:
        """[1, 2, L] fp32 on the CPU that ends with the pictures."""
        job.progress(AUDIO_VAE_DECODE, 0, 1)
        with job.clock.stage(AUDIO_VAE_DECODE):
            wave = self.audio.decode(latents.audio, cancelled=job.cancelled)
        job.progress(AUDIO_VAE_DECODE, 1, 1)
        frames = 8 * (latents.video.shape[2] - 1) + 1
        fitted, note = as_long(wave, round(frames * SAMPLE_RATE / fps))
        if note:
            job.note(note)
        return fitted


def as_long(wave_1CL: Tensor, samples: int) -> tuple[Tensor, str]:
    """The wave cut or filled with silence at its end, and what was done in words ("" for nothing).

    Audio latents last 40 ms and the first of them 10 ms: sound and pictures seldom end together.
    """
    missing = samples - wave_1CL.shape[-1]
    milliseconds = abs(missing) * 1000 / SAMPLE_RATE
    if missing > 0:
        wave = torch.nn.functional.pad(wave_1CL, (0, missing))
        return wave, f"{milliseconds:.0f} ms of silence end the sound with the pictures"
    if missing < 0:
        return wave_1CL[..., :samples], f"the last {milliseconds:.0f} ms of sound are cut off"
    return wave_1CL, ""


def write_latents(latents: Latents, request: Mapping[str, Any], out: Path) -> Path:
    """Writes out/latents.safetensors: tensors "video" and "audio", the request as metadata."""
    path = out / "latents.safetensors"
    tensors = {"video": latents.video.cpu(), "audio": latents.audio.cpu()}
    write_safetensors_atomic(path, tensors, {LATENTS_KEY: json.dumps(dict(request))})
    return path


def read_latents(path: Path, channels: int) -> tuple[Latents, dict[str, Any]]:
    """What write_latents wrote, for a denoiser of so many video channels; ValueError otherwise."""
    video, audio, request = read_pair(path, latents_form(channels))
    return Latents(video=video, audio=audio), request
