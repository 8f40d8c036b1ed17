"""The sage adapters: what they call, what they refuse and why; 2.x kernels were never run here."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention import AttentionOptions, attention_backend, sage1, sage2
from runtime.kernels.attention.sage2 import ROUTES
from runtime.kernels.attention.sage_package import rows_first
from runtime.kernels.attention.sage_reference import FP8_SM90, SAGE1, sage_attention
from runtime.kernels.unavailable import Unavailable

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = 4


class StandIn(ModuleType):
    """sageattention's documented call, computed by torch; remembers its operands."""

    def __init__(self, *, mutates: bool = False) -> None:
        super().__init__("sageattention")
        self.mutates = mutates
        self.operands: tuple[Tensor, ...] = ()
        self.options: dict[str, object] = {}

    def sageattn(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.operands, self.options = (q, k, v), options
        if self.mutates:  # as 1.x does
            k -= k.mean(dim=1, keepdim=True)
        assert options["tensor_layout"] == "NHD"
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).contiguous()


def packed(rows: int, dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> list[Tensor]:
    """As the model hands them over: views of one fused projection, V copied out of it."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, 3 * HEADS * dim, generator=generator).to(dtype)
    q, k, v = (t.unflatten(-1, (HEADS, dim)) for t in qkv.chunk(3, dim=-1))
    return [t[None].transpose(1, 2) for t in (q, k, v.clone())]


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.double() @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights @ v.double()).transpose(1, 2).flatten(2)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("rows", [1, 63, 64, 1021])
def test_sage2_gets_the_views_of_the_projection_and_copies_nothing(rows: int) -> None:
    module = StandIn()
    q, k, v = packed(rows)
    got = sage2.attend_with(module)(q, k, v)
    assert relative(got, softmax(q, k, v)) < 1e-2
    assert [x.data_ptr() for x in module.operands] == [x.data_ptr() for x in (q, k, v)]
    assert module.operands[0].shape == (1, rows, HEADS, 128)
    assert module.options == {"tensor_layout": "NHD", "is_causal": False, "sm_scale": None}


def test_the_output_of_sage2_is_the_packages_own_memory() -> None:
    kept: list[Tensor] = []

    class Keeps(StandIn):
        def sageattn(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
            kept.append(super().sageattn(q, k, v, **options))
            return kept[0]

    got = sage2.attend_with(Keeps())(*packed(65))
    assert got.shape == (1, 65, HEADS * 128) and got.data_ptr() == kept[0].data_ptr()


@pytest.mark.parametrize(("rows", "copied"), [(99_865, False), (99_866, True)])
def test_a_view_of_the_fused_projection_is_copied_where_its_offsets_pass_32_bits(
    rows: int, copied: bool
) -> None:
    qkv = torch.empty(rows, 3 * 56 * 128, dtype=torch.bfloat16, device="meta")
    q_BHSd = qkv[:, : 56 * 128].unflatten(-1, (56, 128))[None].transpose(1, 2)
    assert rows_first(q_BHSd).is_contiguous() is copied


@pytest.mark.parametrize("rows", [128, 320])
def test_sage1_loses_a_k_of_its_own_and_leaves_the_models_alone(rows: int) -> None:
    module = StandIn(mutates=True)
    operands = packed(rows)
    before = [x.clone() for x in operands]
    got = sage1.attend_with(module)(*operands)
    assert relative(got, softmax(*operands)) < 1e-2
    assert all(torch.equal(x, y) for x, y in zip(operands, before, strict=True))
    assert module.options["smooth_k"] is True


@pytest.mark.parametrize(("rows", "ghosts"), [(20_511, 33), (1, 63), (65, 63), (127, 1)])
def test_sage1_refuses_rows_that_do_not_fill_a_tile(rows: int, ghosts: int) -> None:
    one = torch.zeros((), dtype=torch.bfloat16).expand(1, 56, rows, 128)
    module = StandIn()
    said = f"{rows} rows are no multiple of 64, .* attend to {ghosts} keys .* choose attention"
    for attend in (sage1.attend_with(module), sage1.load(CPU, AttentionOptions())):
        with pytest.raises(Unavailable, match=said):
            attend(one, one, one)
    assert not module.options


@pytest.mark.parametrize("adapter", [sage1, sage2])
def test_fp32_is_refused_and_not_handed_to_another_kernel(adapter: ModuleType) -> None:
    module = StandIn()
    with pytest.raises(Unavailable, match="bf16 and fp16 only"):
        adapter.attend_with(module)(*packed(64, torch.float32))
    assert module.options == {}


def test_a_head_dim_without_a_kernel_is_refused() -> None:
    with pytest.raises(Unavailable, match="64 and 128, got 96"):
        sage2.attend_with(StandIn())(*packed(64, dim=96))
    with pytest.raises(Unavailable, match="64 and 96 and 128, got 80"):
        sage1.attend_with(StandIn())(*packed(64, dim=80))


@pytest.mark.parametrize("adapter", [sage1, sage2])
def test_rows_beyond_32_bit_offsets_are_refused(adapter: ModuleType) -> None:
    one = torch.zeros((), dtype=torch.bfloat16)
    far = one.expand(1, 56, 299_648, 128)  # strides of 0: no memory behind it
    with pytest.raises(Unavailable, match="299648 rows overflow"):
        adapter.attend_with(StandIn())(far, far, far)


@pytest.mark.parametrize("version", ["1.0.6", "2.1.1"])
def test_versions_too_old_for_sage2_are_refused_by_number(version: str) -> None:
    assert f"sageattention {version} is installed" in sage2.refusal(version, (12, 0))


@pytest.mark.parametrize("version", ["2.2.0", "0.9"])
def test_sage1_takes_version_1_only(version: str) -> None:
    assert f"sageattention {version} is installed, 1.x is needed" in sage1.refusal(version, (9, 0))
    assert sage1.refusal("1.0.6", (9, 0)) == ""
    assert "8.0 or newer, this GPU has 7.5" in sage1.refusal("1.0.6", (7, 5))


@pytest.mark.parametrize("capability", ROUTES)
def test_every_routed_capability_is_accepted(capability: tuple[int, int]) -> None:
    assert sage2.refusal("2.2.0+cu130", capability) == ""


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (10, 3)])
def test_capabilities_without_kernels_are_refused(capability: tuple[int, int]) -> None:
    assert "this GPU has" in sage2.refusal("2.2.0", capability)


@pytest.mark.parametrize(
    ("name", "version", "kernel"),
    [
        ("sage1", "1.0.6", "qk_int8_per_block_pv_fp16 (Triton)"),
        ("sage2", "2.2.0", "qk_int8_pv_fp8_cuda_sm90 fp32+fp32"),
    ],
)
def test_on_a_gpu_the_package_runs_and_the_route_names_its_kernel(
    name: str, version: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = StandIn()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, own=importlib.import_module: module if name == "sageattention" else own(name),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend = attention_backend(name)
    backend.load(CUDA, AttentionOptions())(*packed(64))
    assert module.options["tensor_layout"] == "NHD"
    assert backend.route(CUDA, AttentionOptions()).startswith(f"sageattention {version} {kernel}")


@pytest.mark.parametrize("name", ["sage1", "sage2"])
def test_a_missing_package_is_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Unavailable, match=f"'{name}' cannot run here: sageattention cannot be"):
        attention_backend(name).load(CUDA, AttentionOptions())


@pytest.mark.parametrize(("name", "maths"), [("sage1", SAGE1), ("sage2", FP8_SM90)])
def test_on_the_cpu_the_reference_runs_and_the_route_says_so(name: str, maths: object) -> None:
    backend = attention_backend(name)
    operands = packed(128)
    got = backend.load(CPU, AttentionOptions())(*operands)
    assert torch.equal(got, sage_attention(*operands, maths))  # type: ignore[arg-type]
    assert backend.route(CPU, AttentionOptions()).startswith("CPU reference of")
