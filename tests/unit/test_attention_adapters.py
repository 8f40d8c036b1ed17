"""Adapters of attention packages: what they call, in which layout, and what they refuse and why.

The packages are stand-ins computed by torch; the real ones run in tests/gpu.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.h3.conditioning import ReferenceBlock
from runtime.h3.denoise import Latents
from runtime.h3.load import attention_options
from runtime.h3.model import Attention
from runtime.h3.video_vae import load_vae_attention
from runtime.kernels.attention import (
    BACKENDS,
    Attend,
    AttentionOptions,
    PackedRows,
    attention_backend,
    ck_int8,
    fa4,
    load_attention,
    sage3,
    sage3_flashinfer,
    sdpa_math,
    sol,
    sol_nvlabs,
)
from runtime.kernels.unavailable import Unavailable
from tests.denoiser_parts import conditioning, demo_plan, denoiser, normal, side

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = AttentionOptions()
HEADS = 4
LOSSY = ("sage3", "sage3_flashinfer", "ck_int8", "sol", "sol_nvlabs")


def packed_views(rows: int, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q and k views of one [S, 3*H*d] buffer, v an own copy, as the denoiser makes them."""
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, 3 * HEADS * dim, generator=generator).to(dtype)
    q, k, v = (t.unflatten(-1, (HEADS, dim)) for t in qkv.chunk(3, dim=-1))
    return [x[None].transpose(1, 2) for x in (q, k, v.clone())]


def far_view(rows: int) -> Tensor:
    """[1, 56, S, 128] without memory behind it."""
    return torch.zeros((), dtype=torch.bfloat16).expand(1, 56, rows, 128)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, H, S, d] by torch."""
    return F.scaled_dot_product_attention(q, k, v)


class Flash(ModuleType):
    """flash_attn.cute: [1, S, H, d] in and out, with the log-sum-exp."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute")
        self.given: tuple[Tensor, ...] = ()
        self.options: dict[str, object] = {}

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, **options: object
    ) -> tuple[Tensor, None]:
        self.given, self.options = (q, k, v), options
        out = attended(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).contiguous(), None


class Sage3(ModuleType):
    """sageattn3: subtracts the mean from the K that it is given."""

    def __init__(self) -> None:
        super().__init__("sageattn3")
        self.options: dict[str, object] = {}

    def sageattn3_blackwell(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.options = options
        k -= k.mean(dim=-2, keepdim=True)
        return attended(q, k, v)


class FlashInfer(ModuleType):
    """flashinfer.nvfp4_attention_sm120: quantises padded rows, masks what is past the length."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("flashinfer.nvfp4_attention_sm120")
        self.error = error
        self.options: dict[str, object] = {}

    def get_nvfp4_attention_sm120_module(self) -> None:
        if self.error is not None:
            raise self.error

    def nvfp4_attention_sm120_quantize_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, per_block_mean: bool
    ) -> tuple[Tensor, ...]:
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and per_block_mean
        return tuple(F.pad(x, (0, 0, 0, -x.shape[2] % 128)) for x in (q, k, v))

    def nvfp4_attention_sm120_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, unpadded_k_len: int, **options: object
    ) -> Tensor:
        self.options = options
        return attended(q, k[:, :, :unpadded_k_len], v[:, :, :unpadded_k_len])


class Kitchen(ModuleType):
    """comfy_kitchen's attention entries."""

    def __init__(self, available: bool = True) -> None:
        super().__init__("comfy_kitchen")
        self.available = available
        self.options: dict[str, object] = {}
        self.backend = ""

    def int8_attention_is_available(self, device: torch.device) -> bool:
        return self.available

    sol_attn_is_available = int8_attention_is_available

    def int8_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        return attended(q, k, v)

    def use_backend(self, name: str) -> AbstractContextManager[None]:
        self.backend = name
        return nullcontext()

    def sol_attn(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.options = options
        out = attended(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).contiguous()


def install(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    version: str,
    capability: tuple[int, int] = (12, 0),
) -> None:
    """As if that package were installed on a machine with such a GPU."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    real = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: module if name == module.__name__ else real(name)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def sol_options(conditioning_rows: int, **fields: object) -> AttentionOptions:
    return AttentionOptions(rows=PackedRows(conditioning=conditioning_rows), **fields)  # type: ignore[arg-type]


def adapters() -> dict[str, Attend]:
    """Every adapter over its stand-in; Sol with some rows of conditioning."""
    options = sol_options(40)
    return {
        "fa4": fa4.attend_with(Flash()),
        "sage3": sage3.attend_with(Sage3()),
        "sage3_flashinfer": sage3_flashinfer.attend_with(FlashInfer()),
        "ck_int8": ck_int8.attend_with(Kitchen()),
        "sol": sol.attend_with(Kitchen(), options),
        "sol_nvlabs": sol_nvlabs.attend_with(Kitchen(), options),
    }


# ---- what all have in common


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 129, 300])
@pytest.mark.parametrize("name", adapters())
def test_any_number_of_rows_goes_in_and_comes_out_in_the_models_layout(
    name: str, rows: int
) -> None:
    q, k, v = packed_views(rows)
    want = attended(q, k, v).transpose(1, 2).flatten(2)
    got = adapters()[name](q, k, v)
    assert got.shape == (1, rows, HEADS * 128)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)  # sage3 rounds K once more


@pytest.mark.parametrize("name", adapters())
def test_the_operands_are_left_as_they_were(name: str) -> None:
    given = packed_views(130)
    before = [x.clone() for x in given]
    adapters()[name](*given)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize("name", adapters())
def test_fp32_is_refused_and_not_handed_to_another_kernel(name: str) -> None:
    with pytest.raises(Unavailable, match=r"bf16 and fp16 only, got torch\.float32"):
        adapters()[name](*packed_views(8, dtype=torch.float32))
    with pytest.raises(Unavailable, match=r"a model of this plan runs in torch\.float32"):
        load_attention(name, CUDA, torch.float32, PLAIN)


@pytest.mark.parametrize("name", adapters())
def test_a_head_dim_without_a_kernel_is_refused(name: str) -> None:
    with pytest.raises(Unavailable, match=r"head dims .*128, got 96"):
        adapters()[name](*packed_views(8, dim=96))


@pytest.mark.parametrize("name", [name for name in BACKENDS if not name.startswith("sdpa")])
def test_a_head_dim_without_a_kernel_is_refused_at_load(name: str) -> None:
    with pytest.raises(Unavailable, match=r"head dims .*128, this model has 80"):
        load_attention(name, CUDA, torch.bfloat16, PLAIN, head_dim=80)


@pytest.mark.parametrize("name", ["sol", "sol_nvlabs", "sage1"])
def test_a_video_vae_refuses_an_attention_without_a_kernel_for_its_tiles(name: str) -> None:
    """Its heads are 64 wide, and its tiles have any number of rows."""
    with pytest.raises(Unavailable, match=r"this model has 64|tiles have any number"):
        load_vae_attention(name, CUDA, torch.bfloat16, PLAIN)


@pytest.mark.parametrize("name", adapters())
def test_rows_beyond_32_bit_offsets_are_refused(name: str) -> None:
    far = far_view(299_594)
    with pytest.raises(Unavailable, match="299594 rows overflow"):
        adapters()[name](far, far, far)


@pytest.mark.parametrize("name", ["sage3", "sage3_flashinfer"])
def test_a_correction_beyond_32_bit_offsets_is_refused(name: str) -> None:
    """FP4 attention keeps a score for every key and 128 queries: it ends before the operands do."""
    far = far_view(70_100)
    with pytest.raises(Unavailable, match="correction of 70100 rows overflows"):
        adapters()[name](far, far, far)


@pytest.mark.parametrize("name", ["fa4", "ck_int8", "sol", "sol_nvlabs"])
def test_a_strided_operand_past_32_bit_offsets_is_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fused QKV buffer element offsets pass 2**31 at 99,864 rows, in a packed copy they do
    not. The bound is lowered here: the copy is the same at any size."""
    seen: list[int] = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend(x.stride(-2) * x.shape[-2] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(globals(), "attended", spy)
    monkeypatch.setattr(
        "runtime.kernels.attention.sage_package.INT32_ELEMENTS", 65 * HEADS * 128 + 1
    )
    adapters()[name](*packed_views(65))
    assert max(seen) <= 65 * HEADS * 128


@pytest.mark.parametrize("name", LOSSY)
def test_on_a_cpu_the_reference_runs_and_the_route_says_so(name: str) -> None:
    q, k, v = packed_views(65)
    attend = load_attention(name, CPU, torch.bfloat16, PLAIN)
    want = attended(*(x.float() for x in (q, k, v))).transpose(1, 2).flatten(2)
    assert float((attend(q, k, v).float() - want).norm() / want.norm()) < 0.21
    assert attention_backend(name).route(CPU, PLAIN).startswith("CPU reference of ")


@pytest.mark.parametrize("name", ["sage3", "sage3_flashinfer", "sol_nvlabs", "fa4"])
def test_a_package_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(
        Unavailable, match=r"(sageattn3|flashinfer-python|sol-attn|flash-attn-4) is"
    ):
        attention_backend(name).load(CUDA, PLAIN)


@pytest.mark.parametrize(
    ("name", "module", "version", "wanted"),
    [
        ("sage1", "sageattention", "1.0.6", "sageattn"),
        ("sage2", "sageattention", "2.2.0", "sageattn"),
        ("kj", "sageattention", "2.2.0", "sageattn"),
        ("sage3", "sageattn3", "1.0.0", "sageattn3_blackwell"),
        (
            "sage3_flashinfer",
            "flashinfer.nvfp4_attention_sm120",
            "0.7.4",
            "get_nvfp4_attention_sm120_module",
        ),
        ("fa4", "flash_attn.cute", "4.0.0", "flash_attn_func"),
        ("ck_int8", "comfy_kitchen", "0.2.31", "int8_attention"),
        ("sol", "comfy_kitchen", "0.2.40", "sol_attn_is_available"),
        ("sol_nvlabs", "sol_attn", "0.1", "sol_attn"),
    ],
)
def test_a_build_without_the_function_is_refused_at_load_and_not_at_the_first_step(
    name: str, module: str, version: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, ModuleType(module), version)
    with pytest.raises(Unavailable, match=f"no {wanted}"):
        attention_backend(name).load(CUDA, PLAIN)


def test_a_package_that_breaks_on_import_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b36")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def broken(name: str) -> ModuleType:
        raise OSError("libcuda.so.1: not found")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(Unavailable, match=r"flash-attn-4 4.0.0b36 cannot be imported \(OSError"):
        fa4.load(CUDA, PLAIN)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("sage3", (9, 0)),
        ("sage3_flashinfer", (10, 0)),
        ("sol_nvlabs", (8, 0)),
        ("fa4", (7, 5)),
    ],
)
def test_a_gpu_without_kernels_is_refused(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    got = ".".join(map(str, capability))
    with pytest.raises(Unavailable, match=f"compute capability .*, this GPU has {got}"):
        attention_backend(name).load(CUDA, PLAIN)


# ---- one by one


def test_fa4_gets_rows_first_views_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Flash()
    install(monkeypatch, module, "4.0.0b36", (9, 0))
    given = packed_views(65)
    fa4.load(CUDA, PLAIN)(*given)
    assert [x.shape for x in module.given] == [(1, 65, HEADS, 128)] * 3
    assert [x.data_ptr() for x in module.given] == [x.data_ptr() for x in given]
    assert module.options == {"causal": False}
    assert fa4.route(CUDA, PLAIN).startswith("flash-attn-4 4.0.0b36 forward sm90 (nvidia-cutlass")


def test_fa4_needs_a_gpu() -> None:
    with pytest.raises(Unavailable, match="needs a CUDA device, got cpu"):
        fa4.load(CPU, PLAIN)


def test_sage3_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Sage3()
    install(monkeypatch, module, "1.0.0", (12, 1))
    sage3.load(CUDA, PLAIN)(*packed_views(65))
    assert module.options == {"is_causal": False, "per_block_mean": True}
    assert sage3.route(CUDA, PLAIN).startswith("sageattn3 1.0.0 sageattn3_blackwell")


def test_flashinfer_gets_the_true_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FlashInfer()
    install(monkeypatch, module, "0.7.4")
    got = sage3_flashinfer.load(CUDA, PLAIN)(*packed_views(65))
    assert got.shape == (1, 65, HEADS * 128)
    assert module.options == {
        "causal": False,
        "per_block_mean": True,
        "out_dtype": torch.bfloat16,
        "return_lse": False,
    }


def test_flashinfer_without_a_compiler_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FlashInfer(RuntimeError("nvcc not found")), "0.7.4")
    with pytest.raises(Unavailable, match=r"flashinfer-python 0.7.4 cannot be compiled \(nvcc not"):
        sage3_flashinfer.load(CUDA, PLAIN)


@pytest.mark.parametrize("name", ["ck_int8", "sol"])
def test_a_kitchen_whose_kernels_do_not_run_here_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Kitchen(available=False), "0.2.40")
    with pytest.raises(Unavailable, match=r"of comfy-kitchen 0\.2\.40 does not run on this GPU"):
        attention_backend(name).load(CUDA, PLAIN)


@pytest.mark.parametrize("version", ["0.2.31", "0.2.39"])
def test_sol_refuses_an_older_kitchen(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Kitchen(), version)
    with pytest.raises(Unavailable, match=f"{version} is installed, 0.2.40 or newer is needed"):
        sol.load(CUDA, PLAIN)


@pytest.mark.parametrize(
    ("rows", "sinks", "blocks", "tokens"),
    [(0, "conditioning", 5, 300), (0, "none", 5, 300), (64, "conditioning", 1, 64),
     (65, "conditioning", 2, 65), (65, "none", 0, 0)],
)  # fmt: skip
def test_sol_keeps_conditioning_exact_and_all_where_there_is_nothing_else(
    rows: int, sinks: str, blocks: int, tokens: int
) -> None:
    options = sol_options(rows, sol_sinks=sinks, sol_tau=1.5)
    kitchen, nvlabs = Kitchen(), Kitchen()
    sol.attend_with(kitchen, options)(*packed_views(300))
    sol_nvlabs.attend_with(nvlabs, options)(*packed_views(300))
    assert kitchen.backend == "cuda"
    assert kitchen.options == {"tau": 1.5, "sink_blocks": [0, blocks], "sink_q": [0, blocks]}
    assert nvlabs.options == {
        "tau": 1.5,
        "thresh_type": "exact",
        "sink_start": 0,
        "sink_tokens": tokens,
    }


def test_sol_records_variant_threshold_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    options = sol_options(0, sol_tau=1.3, sol_sinks="none")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.40")
    want = "comfy-kitchen 0.2.40 sol_attn INT8 (pooled tail), tau 1.3, sinks none"
    assert sol.route(CUDA, options) == want
    assert sol_nvlabs.route(CPU, options).endswith("tau 1.3, sinks none")


def test_nvlabs_sol_is_told_not_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOL_ATTN_STRICT", "0")
    module = Kitchen()
    module.__name__ = "sol_attn"
    install(monkeypatch, module, "0.5.0", (9, 0))
    sol_nvlabs.load(CUDA, PLAIN)
    assert os.environ["SOL_ATTN_STRICT"] == "1"


def test_torch_math_runs_heads_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = packed_views(65)
    want = sdpa_math.load(CPU, PLAIN)(q, k, v)
    monkeypatch.setattr(sdpa_math, "MOST_BYTES", sdpa_math.BYTES_PER_SCORE * 65 * 65 * 3)
    assert sdpa_math.heads_at_once(65) == 3
    torch.testing.assert_close(sdpa_math.load(CPU, PLAIN)(q, k, v), want)


def test_torch_math_says_its_limit_instead_of_running_out_of_memory() -> None:
    far = far_view(sdpa_math.MOST_ROWS + 1)
    with pytest.raises(Unavailable, match=f"at most {sdpa_math.MOST_ROWS} rows, got"):
        sdpa_math.load(CPU, PLAIN)(far, far, far)


# ---- the model says what its rows are


def test_the_options_of_a_plan_reach_the_backend() -> None:
    options = attention_options(demo_plan(sol_tau=1.3, sol_sinks="none", kj_mode="fp8_cuda"))
    assert (options.sol_tau, options.sol_sinks, options.kj_mode) == (1.3, "none", "fp8_cuda")


def test_rows_before_the_targets_are_conditioning_and_the_refiner_has_none() -> None:
    """Of the positive and the negative side in turn; 12 target video rows, 16 of audio."""
    model = denoiser()
    seen: list[int] = []

    def recording(attend: Attend) -> Attend:
        def record(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append(model.packed_rows.conditioning)
            return attend(q, k, v)

        return record

    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = recording(module.attend)
    image = ReferenceBlock(kind="image", latent=normal(1, 24, 1, 4, 4))
    positive = side(model, conditioning(references=(image,)))
    first = len(seen)
    x, sigma = Latents(video=normal(1, 24, 2, 4, 6), audio=normal(1, 32, 2, 8)), torch.tensor(0.5)
    positive.velocity(x, sigma)
    second = len(seen)
    negative = side(model, conditioning(tags=(1,) * 7))
    third = len(seen)
    negative.velocity(x, sigma)
    positive.velocity(x, sigma)
    rows = positive.layout.num_rows - 28
    assert rows > 4 and negative.layout.num_rows - 28 == 7
    assert set(seen[:first]) == {0} and set(seen[first:second]) == {rows}
    assert set(seen[second:third]) == {0} and set(seen[third:]) == {7, rows}
