"""Sigma schedules of the video stream, and the audio stream carried on them (contract 2, 3.1)."""

from __future__ import annotations

import numpy as np
import scipy.stats
import torch
from torch import Tensor

SIGMA_STEPS = 1000
BETA_ALPHA = BETA_BETA = 0.6
MIN_SIGMA = 1e-6


def flow_shift(shift: float, t: Tensor) -> Tensor:
    """Shifted flow time: shift*t / (1 + (shift-1)*t), t in [0, 1], fp32."""
    return shift * t / (1 + (shift - 1) * t)


def sigma_table(shift: float) -> Tensor:
    """The 1000-entry fp32 table, ascending (2.3; k/1000*1000/1000 is k/1000 for all of these)."""
    return _sigma(shift, torch.arange(1, SIGMA_STEPS + 1, dtype=torch.float32))


def sigmas_for(scheduler: str, steps: int, shift: float, denoise: float = 1.0) -> Tensor:
    """[<= steps+1] fp32 on the CPU, descending to 0; beta drops repeated entries (contract 3.1).

    denoise < 1 keeps the last steps+1 of a longer list (ComfyUI's BasicScheduler). ValueError for
    an unknown schedule (it lists the known ones) and for a denoise outside (0, 1].
    """
    if scheduler not in SCHEDULERS:
        raise ValueError(f"scheduler must be one of {', '.join(SCHEDULERS)}, got {scheduler!r}")
    if not 0 < denoise <= 1:
        raise ValueError(f"denoise must be above 0 and at most 1, got {denoise}")
    total = int(steps / denoise)
    return SCHEDULERS[scheduler](shift, total)[-(steps + 1) :]


def map_sigma(sigma: Tensor, from_shift: float, to_shift: float) -> Tensor:
    """Re-express a sigma of one shift on another (contract 2.2), in this operand order."""
    base = sigma / (from_shift + sigma * (1 - from_shift))
    return to_shift * base / (1 + (to_shift - 1) * base)


def audio_sigma(sigma_video: Tensor, shift_video: float, shift_audio: float) -> Tensor:
    """The audio stream's sigma for a video sigma, which is clamped to 1e-6 first (contract 1.8)."""
    return map_sigma(sigma_video.clamp(min=MIN_SIGMA), shift_video, shift_audio)


def _sigma(shift: float, timestep: Tensor) -> Tensor:
    return flow_shift(shift, timestep / 1000)


def _simple(shift: float, steps: int) -> Tensor:
    table = sigma_table(shift)
    stride = SIGMA_STEPS / steps
    picked = [float(table[-(1 + int(i * stride))]) for i in range(steps)]
    return torch.tensor([*picked, 0.0], dtype=torch.float32)


def _beta(shift: float, steps: int) -> Tensor:
    table = sigma_table(shift)
    ts = 1 - np.linspace(0, 1, steps, endpoint=False)
    # numpy's rint rounds halves to even; repeated rows are dropped, so huge step counts shrink
    rows = np.rint(scipy.stats.beta.ppf(ts, BETA_ALPHA, BETA_BETA) * (SIGMA_STEPS - 1))
    kept = [int(r) for i, r in enumerate(rows) if i == 0 or r != rows[i - 1]]
    return torch.tensor([*(float(table[r]) for r in kept), 0.0], dtype=torch.float32)


def _normal(shift: float, steps: int) -> Tensor:
    table = sigma_table(shift)
    timesteps = torch.linspace(float(table[-1]) * 1000, float(table[0]) * 1000, steps)
    return _through_sigma(shift, timesteps)


def _sgm_uniform(shift: float, steps: int) -> Tensor:
    table = sigma_table(shift)
    timesteps = torch.linspace(float(table[-1]) * 1000, float(table[0]) * 1000, steps + 1)[:-1]
    return _through_sigma(shift, timesteps)


def _through_sigma(shift: float, timesteps: Tensor) -> Tensor:
    picked = [float(_sigma(shift, t)) for t in timesteps]
    return torch.tensor([*picked, 0.0], dtype=torch.float32)


SCHEDULERS = {"beta": _beta, "simple": _simple, "normal": _normal, "sgm_uniform": _sgm_uniform}
