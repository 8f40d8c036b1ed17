"""The samplers: pure functions of a denoise callable and a sigma list (contract 3.2, 3.3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# denoise(x [1,1,N] fp32, sigma 0-dim fp32, step) -> denoised [1,1,N] fp32
Denoise = Callable[[Tensor, Tensor, int], Tensor]


def euler(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """Plain Euler on the flow ODE; the last step goes to sigma 0 and is Euler too."""
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i], i)
        x = _euler_step(x, denoised, sigmas[i], sigmas[i + 1])
    return x


def res_multistep(denoise: Denoise, x: Tensor, sigmas: Tensor) -> Tensor:
    """Second-order exponential multistep (eta 0); Euler on the first step and at sigma 0."""
    old_denoised: Tensor | None = None
    old_sigma = sigmas[0]
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i], i)
        if old_denoised is None or sigmas[i + 1] == 0:
            x = _euler_step(x, denoised, sigmas[i], sigmas[i + 1])
        else:
            t, t_next, t_old = (-s.log() for s in (sigmas[i], sigmas[i + 1], old_sigma))
            h = t_next - t
            c2 = (t_old - t) / h
            phi1 = torch.expm1(-h) / (-h)
            phi2 = (phi1 - 1) / (-h)
            b1 = torch.nan_to_num(phi1 - phi2 / c2, nan=0.0)
            b2 = torch.nan_to_num(phi2 / c2, nan=0.0)
            x = (-h).exp() * x + h * (b1 * denoised + b2 * old_denoised)
        old_denoised, old_sigma = denoised, sigmas[i]
    return x


def _euler_step(x: Tensor, denoised: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    d = (x - denoised) / sigma
    return x + d * (sigma_next - sigma)


SAMPLERS = {"euler": euler, "res_multistep": res_multistep}
