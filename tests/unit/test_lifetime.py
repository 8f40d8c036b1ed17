"""memory = low: the bits of a plain block, less of it alive at once, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoints import open_checkpoint
from runtime.checkpoints.base import LayerQuant
from runtime.h3 import lifetime
from runtime.h3.config import H3Config
from runtime.h3.load import load_denoiser
from runtime.h3.model import Block, H3Model, RowSpan
from runtime.kernels.attention import AttentionOptions, attention_backend
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.rope import rope_table
from runtime.kernels.unavailable import Unavailable
from runtime.messages import ModelFiles, Plan

CPU, META = torch.device("cpu"), torch.device("meta")
DEMO = Path(__file__).parents[2] / "presets" / "demo" / "h3_tiny_pruned_bf16.safetensors"
FILES = ModelFiles(dit=DEMO, text_encoder=DEMO, video_vae=DEMO, audio_vae=DEMO)


def plan(**fields: str) -> Plan:
    return replace(Plan(name="p", models=FILES, device="cpu"), **fields)  # type: ignore[arg-type]


def loaded(**fields: str) -> H3Model:
    return load_denoiser(open_checkpoint(DEMO, "dit"), plan(**fields), CPU)[0]


def operands(model: H3Model, rows: int) -> tuple[Tensor, list[Tensor], list[RowSpan], Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, model.cfg.hidden, generator=generator).to(model.dtype)
    tables = [torch.randn(6, model.cfg.hidden, generator=generator) for _ in range(6)]
    angles = torch.randn(rows, 3 * model.cfg.num_inv_freq, generator=generator)
    spans = [RowSpan(0, rows // 3, 0), RowSpan(rows // 3, rows, 4)]
    return x, tables, spans, rope_table(angles, model.dtype)


@pytest.mark.parametrize("attention", ["sdpa", "sage2"])
@pytest.mark.parametrize("rows", [1, 150])
def test_heads_and_rows_in_groups_have_the_bits_of_the_plain_block(
    attention: str, rows: int
) -> None:
    """One group of rows: the matmuls are the plain block's."""
    plain = loaded(attention=attention, dtype="bf16")
    low = loaded(attention=attention, dtype="bf16", memory="low")
    x, *rest = operands(plain, rows)
    want, got = x.clone(), x.clone()
    with torch.inference_mode():
        for a, b in zip(plain.blocks, low.blocks, strict=True):
            want, got = a(want, *rest), b(got, *rest)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_only_the_matmuls_of_row_groups_may_round_otherwise(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BLAS picks its kernel by the number of rows; the sum's order is what can change."""
    monkeypatch.setattr(lifetime, "GROUP_ROWS", 64)
    plain, low = loaded(dtype=dtype), loaded(dtype=dtype, memory="low")
    x, *rest = operands(plain, 150)
    with torch.inference_mode():
        want, got = plain.blocks[0](x.clone(), *rest), low.blocks[0](x.clone(), *rest)
    limit = 1e-6 if dtype == "fp32" else 2e-3
    assert float((got.double() - want.double()).norm() / want.double().norm()) < limit


def test_an_mlp_quantised_row_by_row_has_the_same_bits_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifetime, "GROUP_ROWS", 64)
    plain = loaded(dtype="bf16", dense="fp8_rowwise")
    low = loaded(dtype="bf16", dense="fp8_rowwise", memory="low")
    x, *rest = operands(plain, 150)
    with torch.inference_mode():
        want, got = plain.blocks[0](x.clone(), *rest), low.blocks[0](x.clone(), *rest)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        ({"blocks.0.mlp.fc1": LayerQuant(format="nvfp4")}, {"nvfp4": "nvfp4_native"}),
        ({"blocks.1.mlp.fc2": LayerQuant(format="nvfp4")}, {"nvfp4": "nvfp4_kitchen_fallback"}),
        ({"blocks.0.mlp.fc2": LayerQuant(format="float8_e4m3fn")}, {"fp8": "fp8_tensorwise"}),
        ({}, {"dense": "fp8_tensorwise"}),
    ],
)
def test_a_scale_over_all_rows_is_refused_with_the_layer_and_the_backend(
    stored: Mapping[str, LayerQuant], fields: Mapping[str, str]
) -> None:
    with pytest.raises(
        Unavailable, match=r"by the largest of all rows .* choose memory plain"
    ) as e:
        lifetime.check(_meta(), stored, plan(**fields))
    assert next(iter(fields.values())) in str(e.value)
    assert next(iter(stored), "blocks.0.mlp.fc1") in str(e.value)


def test_a_refused_plan_reads_nothing() -> None:
    seen: list[int] = []
    refused = plan(memory="low", dense="fp8_tensorwise", dtype="bf16")
    with pytest.raises(Unavailable, match="memory low"):
        load_denoiser(open_checkpoint(DEMO, "dit"), refused, CPU, lambda a, b: seen.append(a))
    assert not seen


@pytest.mark.parametrize(
    ("stored", "fields"),
    [
        ({"blocks.0.attn.qkv_proj": LayerQuant(format="nvfp4")}, {"nvfp4": "nvfp4_native"}),
        ({"blocks.0.mlp.fc1": LayerQuant(format="nvfp4")}, {"nvfp4": "nvfp4_dequant"}),
        ({"blocks.0.mlp.fc1": LayerQuant(format="int8_tensorwise")}, {}),
        (
            {"blocks.0.mlp.fc1": LayerQuant(format="nvfp4", full_precision=True)},
            {"nvfp4": "nvfp4_native"},
        ),
    ],
)
def test_what_does_not_share_a_scale_between_rows_is_taken(
    stored: Mapping[str, LayerQuant], fields: Mapping[str, str]
) -> None:
    lifetime.check(_meta(), stored, plan(**fields))


def _meta() -> H3Model:
    cfg = H3Config.from_checkpoint(open_checkpoint(DEMO, "dit"))
    attend = attention_backend("sdpa").load(CPU, AttentionOptions())
    with META:
        return H3Model(cfg, attend, Eager())


def test_every_block_of_the_stack_is_lowered_and_no_other() -> None:
    low, plain = loaded(memory="low"), loaded()
    assert all("forward" in vars(block) for block in low.blocks)
    assert not any("forward" in vars(block) for block in plain.blocks)
    assert isinstance(low.blocks[0], Block)
    assert not any("forward" in vars(block) for block in low.token_refiner.blocks)
