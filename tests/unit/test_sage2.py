"""The sage2 adapter: what it calls, what it refuses and why; its kernels were never run here."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention import AttentionOptions, attention_backend
from runtime.kernels.attention.sage2 import ROUTES, attend_with, refusal
from runtime.kernels.unavailable import Unavailable


class StandIn(ModuleType):
    """sageattention's documented call, computed by torch; remembers its arguments."""

    def __init__(self) -> None:
        super().__init__("sageattention")
        self.options: dict[str, object] = {}

    def sageattn(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.options = options
        return F.scaled_dot_product_attention(q, k, v)


def qkv(rows: int, dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> tuple[Tensor, ...]:
    shape = (1, rows, 4, dim)
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(3)
    )


@pytest.mark.parametrize("rows", [1, 63, 64, 1021])
def test_it_passes_transposed_views_and_returns_rows_by_heads(rows: int) -> None:
    module = StandIn()
    q, k, v = qkv(rows)
    got = attend_with(module)(q, k, v)
    want = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    assert torch.equal(got, want)
    assert module.options == {"tensor_layout": "HND", "is_causal": False, "sm_scale": None}


def test_fp32_is_refused_and_not_handed_to_another_kernel() -> None:
    module = StandIn()
    with pytest.raises(Unavailable, match="bf16 and fp16 only"):
        attend_with(module)(*qkv(8, torch.float32))
    assert module.options == {}


def test_a_head_dim_without_a_kernel_is_refused() -> None:
    with pytest.raises(Unavailable, match="64 and 128, got 96"):
        attend_with(StandIn())(*qkv(8, dim=96))


def test_rows_beyond_32_bit_offsets_are_refused() -> None:
    one = torch.zeros((), dtype=torch.bfloat16)
    far = one.expand(1, 56, 299_594, 128)  # strides of 0: no memory behind it
    with pytest.raises(Unavailable, match="299594 rows overflow"):
        attend_with(StandIn())(far, far, far)


@pytest.mark.parametrize("version", ["1.0.6", "2.1.1"])
def test_old_versions_are_refused_by_number(version: str) -> None:
    assert f"sageattention {version} is installed" in refusal(version, (12, 0))


@pytest.mark.parametrize("capability", ROUTES)
def test_every_routed_capability_is_accepted(capability: tuple[int, int]) -> None:
    assert refusal("2.2.0+cu130", capability) == ""


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (10, 3)])
def test_capabilities_without_kernels_are_refused(capability: tuple[int, int]) -> None:
    assert "this GPU has" in refusal("2.2.0", capability)


def test_the_cpu_is_refused_before_anything_is_imported() -> None:
    with pytest.raises(Unavailable, match="needs a CUDA device"):
        attention_backend("sage2").load(torch.device("cpu"), AttentionOptions())
