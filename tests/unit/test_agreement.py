"""Ranks that differ in a setting do not start: the setting and the rank are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from runtime.agreement import agree, fingerprints
from runtime.h3.schedule import sigmas_for
from runtime.messages import Plan, Ref2VARequest
from tests.denoiser_parts import demo_plan

T = TypeVar("T")


class Other:
    """A team whose rank 1 tells something of its own."""

    rank, ranks = 0, 2

    def __init__(self, told: dict[str, str]) -> None:
        self.told = told

    def share(self, make: Callable[[], T]) -> T:
        return make()

    def collect(self, value: T) -> list[T]:
        return [value, self.told]  # type: ignore[list-item]

    def send(self, x: Tensor) -> None:
        raise AssertionError

    def receive(self, rank: int, like: Tensor) -> Tensor:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def told(plan: Plan | None = None, **fields: object) -> dict[str, str]:
    request = Ref2VARequest(id="r", prompt="a", **fields)  # type: ignore[arg-type]
    sigmas = sigmas_for(request.scheduler, request.steps, request.shift_video)
    return fingerprints(plan or demo_plan(), request, sigmas)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 1}, "request field seed"),
        ({"shift_audio": 4.0}, "request field shift_audio"),
        ({"plan": demo_plan(dtype="bf16")}, "plan field dtype"),
        ({"plan": demo_plan(attention="sdpa_math")}, "plan field attention"),
        ({"plan": demo_plan(layout="CFG2")}, "plan field layout"),
        ({"plan": demo_plan(gather="packed_nvfp4")}, "plan field gather"),
        ({"cfg": 3.0}, "request field cfg"),
        ({"negative_references": True}, "request field negative_references"),
    ],
)
def test_a_setting_that_differs_is_named_with_its_rank(
    other: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{named} of rank 1 is not that of rank 0"):
        agree(Other(told(**other)), told())  # type: ignore[arg-type]


def test_a_switch_of_rounding_counts_too() -> None:
    mine, before = told(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        other = told()
    finally:
        torch.set_float32_matmul_precision(before)
    with pytest.raises(ValueError, match="torch switch float32 matmul precision of rank 1"):
        agree(Other(other), mine)


def test_another_schedule_counts_though_its_fields_agree() -> None:
    with pytest.raises(ValueError, match="sigmas of rank 1"):
        agree(Other(told() | {"sigmas": "other"}), told())


def test_equal_ranks_agree() -> None:
    agree(Other(told()), told())
