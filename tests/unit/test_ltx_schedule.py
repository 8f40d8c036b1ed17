"""Sigmas and steps of the distilled LTX recipe, against diffusers' schedulers bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTXEulerAncestralRFScheduler
from diffusers.pipelines.ltx2 import utils as published

from runtime.ltx.schedule import (
    STAGE1_SIGMAS,
    STAGE2_SIGMAS,
    ancestral,
    ancestral_step,
    euler_step,
    sigma_list,
)


def test_the_published_lists_are_diffusers_own() -> None:
    assert list(STAGE1_SIGMAS) == [*published.DISTILLED_SIGMA_VALUES, 0.0]
    assert list(STAGE2_SIGMAS) == [*published.STAGE_2_DISTILLED_SIGMA_VALUES, 0.0]


@pytest.mark.parametrize("step", range(8))
def test_an_ancestral_step_has_the_schedulers_bits(step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(1, 24, 16, generator=generator)
    velocity = torch.randn(1, 24, 16, generator=generator)
    scheduler = LTXEulerAncestralRFScheduler()
    scheduler.set_timesteps(sigmas=list(STAGE1_SIGMAS))
    expected = scheduler.step(
        velocity, scheduler.timesteps[step], x, generator=torch.Generator().manual_seed(9)
    ).prev_sample
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    sigmas = sigma_list(STAGE1_SIGMAS)
    ours = ancestral_step(
        x, x - sigmas[step] * velocity, noise if step < 7 else None, sigmas[step], sigmas[step + 1]
    )
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("step", range(3))
def test_an_euler_step_has_the_schedulers_bits(step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(1, 24, 16, generator=generator)
    velocity = torch.randn(1, 24, 16, generator=generator)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=False, shift=1.0)
    scheduler.set_timesteps(sigmas=list(STAGE2_SIGMAS[:-1]))
    expected = scheduler.step(velocity, scheduler.timesteps[step], x).prev_sample
    sigmas = sigma_list(STAGE2_SIGMAS)
    assert torch.equal(euler_step(x, velocity, sigmas[step], sigmas[step + 1]), expected)


def test_fresh_noise_restores_the_variance_of_the_noised_state() -> None:
    """x = (1-s)*data + s*noise before and after: the step mixes two independent noises."""
    sigmas = sigma_list(STAGE1_SIGMAS).double()
    for sigma, sigma_next in itertools.pairwise(sigmas[:-1]):
        step = ancestral(sigma, sigma_next)
        carried = step.rescale * step.ratio * sigma
        assert float(carried**2 + step.renoise**2) == pytest.approx(float(sigma_next**2), rel=1e-9)
        data = step.rescale * (step.ratio * (1 - sigma) + 1 - step.ratio)
        assert float(data) == pytest.approx(float(1 - sigma_next), rel=1e-6)


@pytest.mark.parametrize("values", [(1.0,), (1.0, 0.5), (0.5, 0.5, 0.0), (0.2, 0.5, 0.0), (2, 0)])
def test_a_list_that_is_no_schedule_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must start at 1 or below, fall at every step and end"):
        sigma_list(values)
