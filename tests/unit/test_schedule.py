"""Sigma lists against the contract's figures (A1, A2), bit for bit in float32."""

from __future__ import annotations

import pytest
import torch

from runtime.h3.denoise import Shifts
from runtime.h3.schedule import SCHEDULERS, audio_sigma, map_sigma, sigma_table, sigmas_for
from runtime.messages import SCHEDULERS as REQUEST_SCHEDULERS

LISTS = {
    ("beta", 12): """
        1 .997517407 .991726577 .982511938 .969359398 .950418532 .923360527 .882958412
        .820614398 .720732987 .548707724 .270676702 0
    """,
    ("beta", 20): """
        1 .998903573 .996539772 .993096054 .988447547 .982511938 .975175023 .966148257
        .954851627 .940852821 .923360527 .900888324 .872421384 .835247159 .786610842 .720732987
        .629441619 .50376749 .339076519 .14558059 0
    """,
    ("beta", 8): """
        1 .994988143 .982511938 .9607445 .923360527 .855291545 .720732987 .4249084 0
    """,
    ("beta", 4): """
        1 .982511938 .923360527 .720732987 0
    """,
    ("simple", 20): """
        1 .995633185 .990825653 .985507309 .979591846 .972972989 .965517223 .957055211
        .947368383 .93617022 .923076928 .907562971 .888888896 .865979373 .837209284 .800000012
        .75 .679245293 .571428597 .387096792 0
    """,
    ("simple", 12): """
        1 .992513716 .983683884 .972972989 .960057557 .943965554 .923076928 .895650566
        .857509673 .800000012 .70638001 .523908496 0
    """,
    ("simple", 8): """
        1 .988235295 .972972989 .952380955 .923076928 .878048778 .800000012 .631578922 0
    """,
    ("simple", 4): """
        1 .972972989 .923076928 .800000012 0
    """,
    ("normal", 12): """
        1 .991842508 .982076585 .97017473 .955350041 .936375141 .91122365 .8762936 .824505925
        .739775956 .576012254 .125984251 0
    """,
}
CARRY = """
1 1 1 1 | .997517407 .990143001 .992607236 .9921875 | .991726577 .967707992 .975781024 .9765625
.982511938 .933534801 .950151086 .94921875 | .969359398 .887755394 .915816545 .9140625
.950418532 .827354372 .870515823 .87109375 | .923360527 .750749409 .813062072 .8125
.882958412 .653498769 .740124047 .73828125 | .820614398 .533504963 .650128663 .6484375
.720732987 .392171383 .544128537 .54296875 | .548707724 .233108073 .424831033 .42578125
.270676702 .0849056691 .313679278 .314453125
"""
SHIFT = 12.0


def floats(text: str) -> torch.Tensor:
    """Nine digits name one float32."""
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float32)


@pytest.mark.parametrize(("name", "steps"), LISTS)
def test_sigma_lists_are_the_contracts_to_the_last_bit(name: str, steps: int) -> None:
    sigmas = sigmas_for(name, steps, SHIFT)
    assert sigmas.dtype == torch.float32
    assert torch.equal(sigmas, floats(LISTS[name, steps]))


def test_two_beta_entries_have_their_hexadecimal_bits() -> None:
    sigmas = sigmas_for("beta", 12, SHIFT)
    assert float(sigmas[1]) == float.fromhex("0x1.feba9ap-1")
    assert float(sigmas[11]) == float.fromhex("0x1.152c46p-2")


def test_audio_sigma_and_carry_of_beta_12_are_those_of_the_contract() -> None:
    rows = floats(CARRY.replace("|", " ")).reshape(-1, 4)
    sigma_v, sigma_a, carry, rounded = rows.unbind(1)
    assert torch.equal(sigmas_for("beta", 12, SHIFT)[:-1], sigma_v)
    got = torch.stack([audio_sigma(s, SHIFT, 3.0) for s in sigma_v])
    assert torch.equal(got, sigma_a)
    assert torch.equal(got / sigma_v, carry)
    assert torch.equal((got / sigma_v).bfloat16().float(), rounded)


def test_the_audio_sigma_is_the_closed_form() -> None:
    sigma = torch.linspace(1e-3, 1, 50, dtype=torch.float64)
    torch.testing.assert_close(map_sigma(sigma, 12.0, 3.0), sigma / (4 - 3 * sigma))


def test_the_audio_sigma_of_zero_is_that_of_the_smallest_sigma() -> None:
    assert float(audio_sigma(torch.tensor(0.0), SHIFT, 3.0)) == pytest.approx(2.5e-7, rel=1e-4)


def test_mapping_back_returns_the_sigma() -> None:
    sigma = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    torch.testing.assert_close(map_sigma(map_sigma(sigma, 12.0, 3.0), 3.0, 12.0), sigma)


@pytest.mark.parametrize("shift", [0.5, 1.0, 7.0, 12.0, 100.0])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_falls_from_one_to_zero(name: str, shift: float) -> None:
    sigmas = sigmas_for(name, 12, shift)
    assert float(sigmas[0]) == pytest.approx(1.0, abs=1e-6)
    assert float(sigmas[-1]) == 0.0
    assert (sigmas[1:] < sigmas[:-1]).all()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_step_goes_from_one_to_zero(name: str) -> None:
    assert sigmas_for(name, 1, SHIFT).tolist() == [1.0, 0.0]


def test_beta_drops_repeated_rows_at_huge_step_counts() -> None:
    assert len(sigmas_for("beta", 50, SHIFT)) == 51
    sigmas = sigmas_for("beta", 1000, SHIFT)
    assert len(sigmas) < 1001
    assert (sigmas[1:] < sigmas[:-1]).all()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("steps", "denoise", "total"), [(4, 0.5, 8), (12, 0.3, 40), (5, 0.99, 5)])
def test_partial_denoising_keeps_the_end_of_a_longer_list(
    name: str, steps: int, denoise: float, total: int
) -> None:
    got = sigmas_for(name, steps, SHIFT, denoise)
    assert len(got) == steps + 1
    assert torch.equal(got, sigmas_for(name, total, SHIFT)[-(steps + 1) :])


@pytest.mark.parametrize("denoise", [0.0, -0.5, 1.5, float("nan")])
def test_a_denoise_outside_its_range_is_refused(denoise: float) -> None:
    with pytest.raises(ValueError, match="denoise must be above 0 and at most 1"):
        sigmas_for("simple", 4, SHIFT, denoise)


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"beta, simple, normal, sgm_uniform, got 'karras'"):
        sigmas_for("karras", 4, SHIFT)


def test_a_request_offers_exactly_the_schedules_that_exist() -> None:
    assert tuple(SCHEDULERS) == REQUEST_SCHEDULERS


def test_the_table_is_the_shifted_thousandths() -> None:
    table = sigma_table(SHIFT)
    u = torch.arange(1, 1001, dtype=torch.float64) / 1000
    assert table.shape == (1000,)
    torch.testing.assert_close(table.double(), SHIFT * u / (1 + 11 * u), rtol=2e-7, atol=0)
    assert (table[1:] > table[:-1]).all()


def test_the_table_needs_no_round_trip_through_a_thousand() -> None:
    k = torch.arange(1, 1001, dtype=torch.float32)
    assert torch.equal(k / 1000 * 1000 / 1000, k / 1000)


def test_the_audio_scale_is_the_ratio_of_the_shifts() -> None:
    assert Shifts().audio_scale == 4.0
    assert Shifts(video=7.0, audio=2.0).audio_scale == 3.5
