"""KJ's Sage modes: the function and arguments of each, where each runs, what auto is."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.attention import AttentionOptions, attention_backend, kj, sage2, sage3
from runtime.kernels.attention.kj import FORMS, FP4_MODES, form_of
from runtime.kernels.attention.sage_reference import sage_attention
from runtime.kernels.unavailable import Unavailable
from runtime.messages import KJ_MODES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class StandIn(ModuleType):
    """SageAttention 2.2 as far as the modes call it, computed by torch."""

    def __init__(self, *missing: str) -> None:
        super().__init__("sageattention")
        self.missing = missing
        self.called, self.options = "", dict[str, object]()

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        if not name.startswith("sageattn") or name in self.missing:
            raise AttributeError(name)

        def call(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
            self.called, self.options = name, options
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
            return out.transpose(1, 2).contiguous()

        return call


def qkv(rows: int = 70) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    made = torch.randn(3, rows, 2, 128, generator=generator).bfloat16()
    return [x[None].transpose(1, 2) for x in made]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], StandIn]:
    """Installs the stand-in beside a GPU of that compute capability."""

    def install(capability: tuple[int, int]) -> StandIn:
        module, own = StandIn(), importlib.import_module
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.2.0")
        monkeypatch.setattr(
            importlib,
            "import_module",
            lambda name: module if name == "sageattention" else own(name),
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return module

    return install


FUNCTIONS = [
    ("auto", (9, 0), "sageattn", {"sm_scale": None}),
    ("fp16_cuda", (8, 9), "sageattn_qk_int8_pv_fp16_cuda", {"pv_accum_dtype": "fp32"}),
    ("fp16_triton", (8, 6), "sageattn_qk_int8_pv_fp16_triton", {}),
    ("fp8_cuda", (12, 0), "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp32"}),
    ("fp8_cuda", (9, 0), "sageattn_qk_int8_pv_fp8_cuda_sm90", {"pv_accum_dtype": "fp32+fp32"}),
    ("fp8_cuda++", (8, 9), "sageattn_qk_int8_pv_fp8_cuda", {"pv_accum_dtype": "fp32+fp16"}),
]


@pytest.mark.parametrize(("mode", "capability", "function", "arguments"), FUNCTIONS)
def test_a_mode_calls_its_function_and_the_route_says_so(
    mode: str,
    capability: tuple[int, int],
    function: str,
    arguments: dict[str, object],
    package: Callable[[tuple[int, int]], StandIn],
) -> None:
    module, options = package(capability), AttentionOptions(kj_mode=mode)
    backend = attention_backend("kj")
    backend.load(CUDA, options)(*qkv())
    assert module.called == function
    fixed = {"tensor_layout": "NHD", "is_causal": False, "sm_scale": None}
    assert module.options == fixed | arguments
    route = backend.route(CUDA, options)
    assert route.startswith(f"kj {mode}: sageattention 2.2.0 ")
    assert function.removeprefix("sageattn").removeprefix("_") in route


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_auto_is_sage2_bit_for_bit_with_the_package(
    capability: tuple[int, int], package: Callable[[tuple[int, int]], StandIn]
) -> None:
    module, options, operands = package(capability), AttentionOptions(), qkv()
    got = attention_backend("kj").load(CUDA, options)(*operands)
    called = module.called, module.options
    assert torch.equal(got, attention_backend("sage2").load(CUDA, options)(*operands))
    assert called == (module.called, module.options)


def test_auto_is_sage2_bit_for_bit_on_the_cpu() -> None:
    options, operands = AttentionOptions(), qkv()
    got = attention_backend("kj").load(CPU, options)(*operands)
    assert torch.equal(got, attention_backend("sage2").load(CPU, options)(*operands))


@pytest.mark.parametrize("mode", FORMS)
def test_on_the_cpu_each_mode_runs_its_own_reference(mode: str) -> None:
    options, operands = AttentionOptions(kj_mode=mode), qkv()
    got = attention_backend("kj").load(CPU, options)(*operands)
    assert torch.equal(got, sage_attention(*operands, FORMS[mode][0].maths))
    assert f"kj {mode}: CPU reference of qk_int8" in attention_backend("kj").route(CPU, options)


@pytest.mark.parametrize(("mode", "per_block_mean"), FP4_MODES.items())
def test_the_sageattn3_modes_are_sage3s(mode: str, per_block_mean: bool) -> None:
    options, operands = AttentionOptions(kj_mode=mode), qkv(300)  # three blocks of queries
    got = attention_backend("kj").load(CPU, options)(*operands)
    assert torch.equal(got, sage3.load_mode(CPU, per_block_mean=per_block_mean)(*operands))
    assert not torch.equal(got, sage3.load_mode(CPU, per_block_mean=not per_block_mean)(*operands))
    assert f"kj {mode}: CPU reference of Sage" in attention_backend("kj").route(CPU, options)


@pytest.mark.parametrize("mode", ["fp16_cuda", "fp16_triton"])
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_the_fp16_modes_are_refused_on_sm120_where_they_abort(
    mode: str, capability: tuple[int, int], package: Callable[[tuple[int, int]], StandIn]
) -> None:
    module = package(capability)
    with pytest.raises(Unavailable, match=rf"kj_mode {mode} runs on .* GPU has 12.*choose auto"):
        attention_backend("kj").load(CUDA, AttentionOptions(kj_mode=mode))
    assert not module.called


@pytest.mark.parametrize(
    ("mode", "capability"), [("fp8_cuda++", (9, 0)), ("fp8_cuda", (8, 6)), ("fp8_cuda", (10, 0))]
)
def test_a_mode_without_a_kernel_for_the_gpu_is_refused(
    mode: str, capability: tuple[int, int]
) -> None:
    with pytest.raises(Unavailable, match="choose auto"):
        form_of(mode, capability)


def test_a_function_that_the_build_lacks_is_the_reason() -> None:
    form = form_of("fp8_cuda", (9, 0))
    with pytest.raises(Unavailable, match="has no sageattn_qk_int8_pv_fp8_cuda_sm90"):
        kj.attend_with(StandIn(form.function), form)


def test_sageattention_1_is_refused_as_by_sage2(
    package: Callable[[tuple[int, int]], StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    package((9, 0))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.6")
    with pytest.raises(Unavailable, match=r"'kj' cannot run here: sageattention 1\.0\.6"):
        attention_backend("kj").load(CUDA, AttentionOptions(kj_mode="fp8_cuda"))


def test_every_mode_of_the_plan_field_means_something() -> None:
    assert {"auto", *FORMS, *FP4_MODES} == set(KJ_MODES)
    known = set(sage2.ROUTES)
    assert all(set(form.capabilities) <= known for forms in FORMS.values() for form in forms)
