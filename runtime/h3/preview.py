"""A look at the clip while it is made: the denoised latent as RGB, written as an animated webp."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from runtime.h3.sizes import LATENTS_PER_CLIP
from runtime.media.files import atomic_file
from runtime.messages import FPS

# Contract 0.1.15: one row per latent channel, one column per colour, in [-1, 1]
FACTORS = (
    (-0.018555, 0.024344, -0.017536),
    (0.150164, 0.137244, 0.129221),
    (0.027367, -0.050369, -0.208606),
    (-0.000793, -0.164622, -0.323161),
    (-0.048556, 0.013970, -0.074286),
    (0.011740, 0.014172, -0.006906),
    (0.061517, 0.061212, 0.110025),
    (0.035321, 0.086879, 0.110059),
    (-0.017426, 0.002997, 0.035356),
    (0.531539, 0.548819, 0.624404),
    (-0.024968, -0.040234, -0.034302),
    (-0.032549, -0.029096, -0.017221),
    (0.022609, 0.020286, 0.050661),
    (-0.084001, -0.038131, -0.020805),
    (-0.018830, 0.010412, 0.061120),
    (0.020777, 0.011196, -0.030994),
    (-0.008390, -0.012201, -0.025687),
    (-0.013281, -0.002924, 0.006331),
    (0.000260, 0.001833, -0.011038),
    (0.105471, 0.100482, 0.132106),
    (0.016529, 0.015213, 0.009999),
    (-0.014015, -0.017438, -0.019134),
    (-0.033787, -0.009984, -0.019725),
    (0.004224, 0.017284, 0.027196),
)
BIAS = (0.057426, -0.022078, -0.071449)


def rgb_frames(latent: Tensor) -> NDArray[np.uint8]:
    """[1, 24, T, h, w] on any device -> [T, h, w, 3] on the CPU; the latent is not written."""
    factors = torch.tensor(FACTORS, device=latent.device)
    bias = torch.tensor(BIAS, device=latent.device)
    rgb = latent[0].float().movedim(0, -1) @ factors + bias
    frames: NDArray[np.uint8] = (
        ((rgb + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8).cpu().numpy()
    )
    return frames


def shown_milliseconds(latent_frames: int) -> tuple[int, ...]:
    """How long each latent frame is shown at real speed: the first of a clip is one frame of
    video, the others are four; whole milliseconds that add up to the clip's length.
    """
    ends, frames = [0], 0
    for index in range(latent_frames):
        frames += 1 if index % LATENTS_PER_CLIP == 0 else 4
        ends.append(round(1000 * frames / FPS))
    return tuple(end - start for start, end in itertools.pairwise(ends))


def write_webp(path: Path, frames: NDArray[np.uint8], milliseconds: Sequence[int]) -> None:
    """[T, h, w, 3] as an endless animation, lossless: at this size the fastest, and the sharpest.

    Raises OSError (DiskFullError) when it cannot be written; an older file then stays.
    """
    first, *rest = (Image.fromarray(frame) for frame in frames)
    with atomic_file(path) as part:
        first.save(
            part,
            "WEBP",
            save_all=True,
            append_images=rest,
            duration=list(milliseconds),
            loop=0,
            lossless=True,
            quality=0,
            method=0,
        )


class Previews:
    """One animation, written anew for each step by a thread, beside the next step.

    written: told (step, path) from the thread. failed: told once, in the caller's thread, why there
    are no more: a preview is no reason to lose a run.
    """

    def __init__(
        self, path: Path, written: Callable[[int, Path], None], failed: Callable[[str], None]
    ) -> None:
        self._path, self._written, self._failed = path, written, failed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="preview")
        self._writing: Future[None] | None = None
        self._broken = False

    def show(self, step: int, latent: Tensor) -> None:
        """Waits for the pixels of `latent` [1, 24, T, h, w], and for the step before."""
        self._settle()
        if not self._broken:
            frames = rgb_frames(latent)
            self._writing = self._thread.submit(self._write, step, frames)

    def close(self) -> None:
        """Waits for the last one; afterwards nothing writes."""
        self._settle()
        self._thread.shutdown()

    def _write(self, step: int, frames: NDArray[np.uint8]) -> None:
        write_webp(self._path, frames, shown_milliseconds(len(frames)))
        self._written(step, self._path)

    def _settle(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            self._broken = True
            self._failed(str(error))
