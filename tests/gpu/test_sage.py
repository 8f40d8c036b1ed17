"""SageAttention on a GPU against the reference of its arithmetic; `-rs` says what is not installed.

tests/gpu/test_attention_backends.py holds every backend against the softmax; here the kernels are
held against sage_reference.py, which shares their roundings but not the order of their sums.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.kernels.attention import Attend, AttentionOptions, load_attention
from runtime.kernels.attention.kj import FORMS, form_of
from runtime.kernels.attention.sage_reference import (
    FP8_FP16,
    FP8_SM90,
    FP8_SM120,
    FP16_CUDA,
    FP16_TRITON,
    SAGE1,
    SageMaths,
    sage_attention,
)
from runtime.kernels.unavailable import Unavailable
from runtime.messages import KJ_MODES

# The package warns as it compiles: nothing of ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CUDA = torch.device("cuda")
HEADS, DIM = 8, 128
SAGE2 = {
    (8, 0): FP16_CUDA,
    (8, 6): FP16_TRITON,
    (8, 7): FP16_CUDA,
    (8, 9): FP8_FP16,
    (9, 0): FP8_SM90,
    (12, 0): FP8_SM120,
    (12, 1): FP8_SM120,
}
# relative L2: the same codes, other sums. The FP8 tensor cores of Ada and Hopper keep about 14 bits
# of a sum, and a probability on the edge of two codes falls to either side.
LIMIT = 2e-2


def views(rows: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """As the denoiser hands them over; keys have a mean that smoothing has to take away."""
    generator = torch.Generator(CUDA).manual_seed(rows)
    qkv = torch.randn(rows, 3 * heads * DIM, device=CUDA, generator=generator)
    qkv[:, heads * DIM : 2 * heads * DIM] += 2
    q, k, v = (t.unflatten(-1, (heads, DIM)) for t in qkv.bfloat16().chunk(3, dim=-1))
    return q[None].transpose(1, 2), k[None].transpose(1, 2), v.clone()[None].transpose(1, 2)


def loaded(name: str, mode: str = "auto") -> Attend:
    try:
        return load_attention(name, CUDA, torch.bfloat16, AttentionOptions(kj_mode=mode))
    except Unavailable as error:
        pytest.skip(str(error))


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("rows", [64, 1024, 4096])
def test_sage1_is_its_reference_where_it_runs(rows: int) -> None:
    attend, given = loaded("sage1"), views(rows)
    assert distance(attend(*given), sage_attention(*given, SAGE1)) < LIMIT


def test_the_kernel_of_sage1_counts_the_ghost_keys_that_the_adapter_refuses() -> None:
    loaded("sage1")
    import sageattention  # past the adapter: what it would do

    q, k, v = views(351)  # 33 keys short of six tiles
    v = v + 2
    got = sageattention.sageattn(q.contiguous(), k.clone(), v.contiguous(), tensor_layout="HND")
    got = got.transpose(1, 2).flatten(2)
    with_ghosts, without = (sage_attention(q, k, v, maths) for maths in (SAGE1, FP16_TRITON))
    assert distance(got, with_ghosts) < LIMIT < distance(got, without)


@pytest.mark.parametrize("rows", [1, 65, 351, 4096])
def test_sage2_is_the_reference_of_its_route_at_any_number_of_rows(rows: int) -> None:
    attend, given = loaded("sage2"), views(rows)
    maths = SAGE2[torch.cuda.get_device_capability()]
    assert distance(attend(*given), sage_attention(*given, maths)) < LIMIT


def test_sage2_writes_into_no_operand_and_its_output_needs_no_copy() -> None:
    attend, given = loaded("sage2"), views(1021)
    before = [x.clone() for x in given]
    out = attend(*given)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
    assert out.is_contiguous() and out._base is not None  # a view of the kernel's own output


def test_rows_past_the_32_bit_bound_of_the_fused_projection_are_right() -> None:
    """Two heads at the end of a buffer whose row 99,866 lies past 2**31 elements."""
    attend = loaded("sage2")
    rows, width = 100_352, 3 * 56 * DIM
    qkv = torch.empty(rows, width, dtype=torch.bfloat16, device=CUDA)
    generator = torch.Generator(CUDA).manual_seed(1)
    for part in qkv.split(8192):
        part.normal_(generator=generator)
    q, k, v = (t.unflatten(-1, (56, DIM))[:, -2:] for t in qkv.chunk(3, dim=-1))
    strided = attend(*(t[None].transpose(1, 2) for t in (q, k, v.clone())))
    packed = attend(*(t.contiguous()[None].transpose(1, 2) for t in (q, k, v)))
    assert torch.equal(strided, packed)


@pytest.mark.parametrize("mode", [m for m in KJ_MODES if m in FORMS])
def test_a_kj_mode_is_the_reference_of_its_kernel(mode: str) -> None:
    attend, given = loaded("kj", mode), views(1021)
    maths: SageMaths = form_of(mode, torch.cuda.get_device_capability()).maths
    assert distance(attend(*given), sage_attention(*given, maths)) < LIMIT


def test_kj_auto_is_sage2_bit_for_bit() -> None:
    auto, sage2, given = loaded("kj"), loaded("sage2"), views(1021)
    assert torch.equal(auto(*given), sage2(*given))


@pytest.mark.parametrize("name", ["sage2", "kj"])
def test_heads_do_not_depend_on_each_other(name: str) -> None:
    """What memory = low relies on when it attends in groups of heads."""
    attend, (q, k, v) = loaded(name), views(1021)
    whole = attend(q, k, v).unflatten(-1, (HEADS, DIM))
    some = attend(q[:, 2:4], k[:, 2:4], v[:, 2:4].clone()).unflatten(-1, (2, DIM))
    assert torch.equal(whole[:, :, 2:4], some)
