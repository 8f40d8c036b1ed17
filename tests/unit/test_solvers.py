"""The samplers on denoisers whose exact solution is known (contract 3.2, 3.3, B7)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.h3.schedule import sigmas_for
from runtime.messages import SAMPLERS as REQUEST_SAMPLERS
from runtime.solvers import SAMPLERS, Denoise, euler, res_multistep

START = torch.tensor([[[1.5, -0.25, 0.75, -2.0]]])


def states(sampler: str, denoise: Denoise, x: Tensor, sigmas: Tensor) -> list[Tensor]:
    """x before every step, then the result."""
    seen: list[Tensor] = []

    def spy(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        assert step == len(seen) and torch.equal(sigma, sigmas[step])
        seen.append(x)
        return denoise(x, sigma, step)

    end = SAMPLERS[sampler](spy, x, sigmas)
    return [*seen, end]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_constant_prediction_is_approached_along_a_straight_line(sampler: str) -> None:
    target = torch.tensor([[[0.5, 0.5, -1.0, 2.0]]])
    sigmas = sigmas_for("beta", 12, 12.0)
    for x, sigma in zip(
        states(sampler, lambda x, sigma, step: target, START, sigmas), sigmas, strict=True
    ):
        torch.testing.assert_close(x, target + sigma * (START - target), rtol=0, atol=2e-6)


def test_res_multistep_is_exact_for_a_prediction_linear_in_log_sigma() -> None:
    slope, base = torch.tensor([[[0.3, -0.2, 1.0, 0.0]]]).double(), 0.7
    sigmas = torch.logspace(0, -1, 6, dtype=torch.float64)

    def denoise(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        return base - slope * sigma.log()

    seen = states("res_multistep", denoise, START.double(), sigmas)
    t = -sigmas.log()
    for i in range(1, len(sigmas) - 1):  # the first step is Euler
        particular = [base + slope * (t[k] - 1) for k in (i, i + 1)]
        want = particular[1] + (seen[i] - particular[0]) * torch.exp(t[i] - t[i + 1])
        torch.testing.assert_close(seen[i + 1], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("res_multistep", 2)])
def test_doubling_the_steps_shrinks_the_error_by_the_samplers_order(
    sampler: str, order: int
) -> None:
    k = -0.5  # D = k*x: x is proportional to sigma**(1-k)

    def error(steps: int) -> float:
        sigmas = torch.logspace(0, -1.5, steps + 1, dtype=torch.float64)
        got = SAMPLERS[sampler](lambda x, sigma, step: k * x, START.double(), sigmas)
        return float((got - START.double() * sigmas[-1] ** (1 - k)).abs().max())

    ratio = error(256) / error(512)
    assert 2**order * 0.9 < ratio < 2**order * 1.1


def literal(x: Tensor, denoised: list[Tensor], sigmas: Tensor) -> list[Tensor]:
    """Contract 3.2 step by step in float64 from stored predictions."""
    x, s = x.double(), sigmas.double()
    out = [x]
    for i in range(len(s) - 1):
        d = denoised[i].double()
        if i == 0 or s[i + 1] == 0:
            x = x + (x - d) / s[i] * (s[i + 1] - s[i])
        else:
            h = torch.log(s[i] / s[i + 1])
            c2 = torch.log(s[i] / s[i - 1]) / h
            phi1 = (1 - torch.exp(-h)) / h
            phi2 = (1 - phi1) / h
            b2 = phi2 / c2
            x = torch.exp(-h) * x + h * ((phi1 - b2) * d + b2 * denoised[i - 1].double())
        out.append(x)
    return out


@pytest.mark.parametrize("schedule", ["beta", "simple", "normal"])
def test_res_multistep_of_a_linear_toy_follows_the_contract(schedule: str) -> None:
    sigmas = sigmas_for(schedule, 12, 12.0)
    predictions: list[Tensor] = []

    def toy(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        predictions.append(0.3 * x + 0.1 * sigma)
        return predictions[-1]

    seen = states("res_multistep", toy, START, sigmas)
    for got, want in zip(seen, literal(START, predictions, sigmas), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_last_step_is_euler_to_the_bit_not_the_prediction(sampler: str) -> None:
    sigmas = sigmas_for("beta", 12, 12.0)
    x = torch.randn(1, 1, 4096, generator=torch.Generator().manual_seed(0))

    def toy(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        return torch.tanh(x) * (1 - sigma)

    seen = states(sampler, toy, x, sigmas)
    before, last = seen[-2], toy(seen[-2], sigmas[-2], 0)
    assert torch.equal(seen[-1], before + (before - last) / sigmas[-2] * (0 - sigmas[-2]))
    torch.testing.assert_close(seen[-1], last, rtol=0, atol=1e-6)
    assert not torch.equal(seen[-1], last)


def test_two_steps_to_zero_are_euler_in_both_samplers() -> None:
    sigmas = torch.tensor([1.0, 0.4, 0.0])

    def toy(x: Tensor, sigma: Tensor, step: int) -> Tensor:
        return 0.5 * x

    assert torch.equal(res_multistep(toy, START, sigmas), euler(toy, START, sigmas))


def test_the_start_is_not_written_to() -> None:
    x = START.clone()
    for sampler in SAMPLERS.values():
        sampler(lambda x, sigma, step: 0.5 * x, x, sigmas_for("simple", 4, 12.0))
    assert torch.equal(x, START)


def test_a_request_offers_exactly_the_samplers_that_exist() -> None:
    assert set(SAMPLERS) == set(REQUEST_SAMPLERS)
