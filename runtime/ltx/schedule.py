"""The distilled recipe's sigmas and its two steps, as pure functions (ltx25 contract 4).

Every sigma is a 0-dim tensor; a step computes in the dtype of its state, which the sampler keeps in
float32. The expressions keep the operand order of diffusers' LTXEulerAncestralRFScheduler and
FlowMatchEulerDiscreteScheduler(shift=1), so equal inputs give equal bits
(the 1e-12 that the former adds to its two divisors is below half an ulp of them).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

STAGE1_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
STAGE2_SIGMAS = (0.909375, 0.725, 0.421875, 0.0)

Sampler = Literal["euler_ancestral", "euler"]


def sigma_list(values: Sequence[float]) -> Tensor:
    """[steps+1] fp32 on the CPU. ValueError unless it falls strictly and ends in 0."""
    falling = all(a > b for a, b in itertools.pairwise(values))
    if len(values) < 2 or not falling or values[-1] != 0 or values[0] > 1:
        raise ValueError(
            f"sigmas must start at 1 or below, fall at every step and end in 0, got {list(values)}"
        )
    return torch.tensor(values, dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestral:
    """Coefficients of one ancestral step with eta 1, as 0-dim tensors of the sigmas' dtype."""

    down: Tensor  # the sigma the deterministic part steps down to
    ratio: Tensor  # down / sigma: weight of the state against the prediction
    rescale: Tensor  # (1 - next) / (1 - down): back on the line between data and noise
    renoise: Tensor  # standard deviation of the fresh noise


def ancestral(sigma: Tensor, sigma_next: Tensor) -> Ancestral:
    """Coefficients of the step from sigma to sigma_next > 0 (rectified flow, eta 1, s_noise 1)."""
    down = sigma_next * (1.0 + (sigma_next / sigma - 1.0))
    signal, signal_down = 1.0 - sigma_next, 1.0 - down
    variance = sigma_next**2 - down**2 * signal**2 / signal_down**2
    return Ancestral(
        down=down,
        ratio=down / sigma,
        rescale=signal / signal_down,
        renoise=variance.clamp(min=0.0).sqrt(),
    )


def ancestral_step(
    x: Tensor, denoised: Tensor, noise: Tensor | None, sigma: Tensor, sigma_next: Tensor
) -> Tensor:
    """x at sigma_next; `noise` (shape of x, unit variance) is None only for the step to 0."""
    if noise is None:
        return denoised
    step = ancestral(sigma, sigma_next)
    x = step.ratio * x + (1.0 - step.ratio) * denoised
    return step.rescale * x + noise * step.renoise


def euler_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x at sigma_next along the velocity; the step to 0 is the prediction x - sigma*velocity."""
    return x + (sigma_next - sigma) * velocity
