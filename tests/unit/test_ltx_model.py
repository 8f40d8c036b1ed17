"""The LTX denoiser against diffusers' module with the same random weights, and its two forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from runtime.bench.ltx_peer import diffusers_twin, own_times
from runtime.ltx.forms import COMFY, MODEL, Form
from runtime.ltx.layers import rotated
from runtime.ltx.model import LTXModel
from runtime.ltx.modulation import TokenRows, TokenTimes, distinct
from runtime.ltx.packing import Rotation, rope_tables
from runtime.ltx.published import denoiser as published_names
from tests.ltx_parts import FPS, SHAPE, inputs, run, tiny_config, tiny_model

HALF = torch.bfloat16


def theirs(model: LTXModel) -> LTX2VideoTransformer3DModel:
    """diffusers' module with the weights of ours, as shipped."""
    return diffusers_twin(model, model.dtype)


def reference(
    twin: LTX2VideoTransformer3DModel, arguments: Any, *, fps: float = FPS
) -> tuple[Tensor, Tensor]:
    dtype = twin.dtype
    with torch.inference_mode():
        found: tuple[Tensor, Tensor] = twin(
            arguments["video_BNC"].to(dtype),
            arguments["audio_BAC"].to(dtype),
            arguments["context_video"].to(dtype),
            arguments["context_audio"].to(dtype),
            timestep=arguments["video_timestep_BN"] * 1000,
            audio_timestep=arguments["audio_timestep_BA"] * 1000,
            sigma=arguments["video_sigma_B"] * 1000,
            audio_sigma=arguments["audio_sigma_B"] * 1000,
            num_frames=SHAPE.frames,
            height=SHAPE.height,
            width=SHAPE.width,
            fps=fps,
            audio_num_frames=SHAPE.audio,
            use_cross_timestep=True,
            video_keyframes_mask=arguments["keyframe_mask"],
            return_dict=False,
        )
    return found


def far(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> list[float]:
    """Relative maximum of video and of audio."""
    return [
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(got, want, strict=True)
    ]


def met(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], cpu_paths: str) -> bool:
    """Bit for bit on pinned CPU paths, else within the gate of an fp32 forward."""
    if cpu_paths == "pinned":
        return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return max(far(got, want)) < 2e-6


# ---- the model's own form


@pytest.mark.parametrize("sigma", [0.725, 0.909375, 1.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_forward_has_the_bits_of_diffusers(
    sigma: float, frozen: bool, batch: int, cpu_paths: str
) -> None:
    model = tiny_model()
    arguments = inputs(model.config, batch=batch, sigma=sigma, frozen=frozen)
    assert met(run(model, arguments), reference(own_times(theirs(model)), arguments), cpu_paths)


def test_other_rates_biases_and_widths_have_them_too(cpu_paths: str) -> None:
    config = tiny_config(ff_bias=True, audio_ff_bias=False, num_layers=2, attention_head_dim=24)
    model = tiny_model(config)
    arguments = inputs(config)
    rope = rope_tables(config, SHAPE, 25.0)
    want = reference(own_times(theirs(model)), arguments, fps=25.0)
    assert met(run(model, arguments, rope=rope), want, cpu_paths)


def test_the_eps_of_the_config_is_not_that_of_queries_and_keys(cpu_paths: str) -> None:
    model = tiny_model(tiny_config(norm_eps=1e-2))
    twin = theirs(model)
    for block in twin.transformer_blocks:
        for norm in (m for name, m in block.named_children() if "norm" in name):
            norm.eps = 1e-2
    arguments = inputs(model.config)
    assert met(run(model, arguments), reference(own_times(twin), arguments), cpu_paths)


def test_a_sigma_of_its_own_for_audio(cpu_paths: str) -> None:
    """Given sound: no time passes in it, and its sigma is 0 for the gates and the prompt."""
    model = tiny_model()
    arguments = inputs(model.config)
    arguments["audio_timestep_BA"] = torch.zeros(1, SHAPE.audio)
    arguments["audio_sigma_B"] = torch.zeros(1)
    want = reference(own_times(theirs(model)), arguments)
    assert met(run(model, arguments), want, cpu_paths)
    assert max(far(run(model, inputs(model.config)), want)) > 1e-3


def test_bf16_has_the_bits_of_diffusers_with_rounded_tables(cpu_paths: str) -> None:
    if cpu_paths != "pinned":
        pytest.skip(cpu_paths)
    model = tiny_model(dtype=HALF)
    for frozen in (False, True):
        arguments = inputs(model.config, frozen=frozen)
        got, want = run(model, arguments), reference(own_times(theirs(model)), arguments)
        assert got[0].dtype == HALF and met(got, want, cpu_paths)


def test_diffusers_as_shipped_is_told_apart_where_tokens_are_frozen() -> None:
    model = tiny_model()
    arguments = inputs(model.config, frozen=True)
    assert min(far(run(model, arguments), reference(theirs(model), arguments))) > 1e-2


def test_the_video_that_v2a_reads_is_a_choice_that_shows() -> None:
    model = tiny_model()
    arguments = inputs(model.config)
    own = run(model, arguments)
    later = run(model, arguments, v2a_source="post_a2v")
    assert min(far(later, own)) > 1e-3
    with pytest.raises(ValueError, match="v2a_source must be pre_a2v or post_a2v, got 'post'"):
        run(model, arguments, v2a_source="post")


def test_tables_are_fp32_until_the_sum_unless_rounded_before() -> None:
    """(1 + 2**-9) + 2**-8: rounded once it is 1 + 2**-7, a rounded table loses its part."""
    table = torch.tensor([[1 + 2**-9]])
    rows = TokenRows(rows_BUM=torch.tensor([[[2**-8]]], dtype=HALF), index_BT=None)
    assert rows.with_table(table)[0].item() == 1 + 2**-7
    assert rows.with_table(table.to(HALF))[0].item() == 1.0


# ---- keyframes, names


def test_without_the_keyframes_tensor_it_counts_as_zeros() -> None:
    whole, lacking = tiny_model(), tiny_model(keyframes=False)
    assert lacking.keyframes_abs_pos_embedding is None
    lacking.load_state_dict(
        {k: v for k, v in whole.state_dict().items() if k != "keyframes_abs_pos_embedding"}
    )
    arguments = inputs(whole.config)
    without = run(whole, arguments | {"keyframe_mask": torch.zeros(1, SHAPE.video_tokens, 1)})
    assert all(torch.equal(a, b) for a, b in zip(run(lacking, arguments), without, strict=True))
    assert far(without, run(whole, arguments))[0] > 1e-3


@pytest.mark.parametrize("keyframes", [False, True])
def test_parameters_have_the_published_names_and_shapes(keyframes: bool) -> None:
    config = tiny_config()
    model = tiny_model(config, keyframes=keyframes)
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    want = {spec.name: tuple(spec.shape) for spec in published_names(config, keyframes=keyframes)}
    assert found == want


# ---- one row per distinct time


def test_distinct_times_give_each_token_its_own() -> None:
    time = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.5, 0.5, 0.0, 0.5]])
    times = distinct(time)
    assert times.values_BU.tolist() == [[0.0, 0.5]] * 2 and times.index_BT is not None
    assert torch.equal(times.values_BU.gather(1, times.index_BT), time)
    assert distinct(torch.full((2, 3), 0.25)).index_BT is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_that_run_once_per_time_keep_a_half_types_bits(
    frozen: bool, batch: int, cpu_paths: str
) -> None:
    model = tiny_model(dtype=HALF)
    arguments = inputs(model.config, batch=batch, frozen=frozen)
    each = {
        name: TokenTimes(values_BU=arguments[name])
        for name in ("video_timestep_BN", "audio_timestep_BA")
    }
    got, want = run(model, arguments), run(model, arguments | each)
    assert far(got, want) == [0.0, 0.0] if cpu_paths == "pinned" else max(far(got, want)) < 3e-2


def test_times_that_are_told_apart_by_the_caller_are_the_same_evaluation() -> None:
    model = tiny_model()
    arguments = inputs(model.config, frozen=True)
    index = (torch.arange(SHAPE.video_tokens) >= SHAPE.frame_tokens).long()[None]
    told = {
        "video_timestep_BN": TokenTimes(values_BU=torch.tensor([[0.0, 0.725]]), index_BT=index),
        "audio_timestep_BA": TokenTimes(values_BU=torch.tensor([[0.725]])),
    }
    assert max(far(run(model, arguments | told), run(model, arguments))) < 2e-6


@pytest.mark.parametrize("form", [MODEL, COMFY])
def test_a_rotation_turns_halves_and_keeps_the_layout(form: Form) -> None:
    """By a quarter: (a, b) to (-b, a); queries stay views of [B, T, H, d]."""
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    zero, one = torch.zeros(1, 3, 5, 4), torch.ones(1, 3, 5, 4)
    got = rotated(x, Rotation(cos_BHTr=zero, sin_BHTr=one), form)
    assert torch.equal(got, torch.cat([-x[..., 4:], x[..., :4]], dim=-1))
    assert got.stride() == x.stride()


# ---- ComfyUI's form


def test_comfys_form_is_the_same_model_within_its_eps() -> None:
    config = tiny_config()
    own, comfy = tiny_model(config), tiny_model(config, form=COMFY)
    for frozen in (False, True):
        arguments = inputs(config, frozen=frozen)
        off = far(run(comfy, arguments), run(own, arguments))
        assert 1e-7 < max(off) < 2e-5


def test_comfys_form_norms_queries_and_keys_alone_with_another_eps() -> None:
    for form, eps in ((COMFY, 1e-5), (MODEL, 1e-6)):
        block = tiny_model(form=form).transformer_blocks[0]
        attention = block.get_submodule("video_to_audio_attn")
        assert attention.q_norm.eps == attention.k_norm.eps == eps
        assert block.eps == 1e-6
