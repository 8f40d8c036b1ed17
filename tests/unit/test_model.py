"""The denoiser's arithmetic against literal row-by-row references (contract 1.4 to 1.16)."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from runtime.checkpoints.base import CheckpointError
from runtime.checkpoints.demo import random_checkpoint
from runtime.checkpoints.file import IndexedCheckpoint
from runtime.h3.conditioning import Keyframe, ReferenceBlock
from runtime.h3.config import H3Config
from runtime.h3.denoise import Side, draw_noise, step_rows
from runtime.h3.load import load_denoiser
from runtime.h3.model import (
    Attention,
    H3Model,
    RowSpan,
    pack_audio,
    patchify,
    unpack_audio,
    unpatchify,
)
from runtime.h3.schedule import audio_sigma
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.rope import rope_table
from tests.denoiser_parts import CPU, TARGET, conditioning, demo_plan, denoiser, normal, side

BF16 = torch.bfloat16
SPANS = (RowSpan(0, 5, 1), RowSpan(5, 6, 0), RowSpan(6, 19, 3), RowSpan(19, 32, 2))
ISLANDS = (
    "video_patch_proj", "audio_patch_proj", "time_embedder", "final_layer.video_out",
    "final_layer.audio_out",
)  # fmt: skip
TAGS = (1, 0, 0, 1, 1, 0, 1)
MODALITY = {
    "video": 0, "cond": 0, "ref_img": 0, "audio": 2, "cond_audio": 2, "ref_audio": 2,
}  # fmt: skip
MIXED = conditioning(
    TAGS,
    references=(
        ReferenceBlock(
            kind="video_audio", latent=normal(1, 24, 2, 4, 4), audio_latent=normal(1, 32, 2, 6)
        ),
        ReferenceBlock(kind="image", latent=normal(1, 24, 1, 2, 6)),
        ReferenceBlock(kind="audio", audio_latent=normal(1, 32, 2, 3)),
    ),
    keyframes=(
        Keyframe(
            frame_index=0, latent=normal(1, 24, 1, 4, 6), audio_latent=normal(1, 32, 2, 2)
        ),
    ),
)  # fmt: skip


def rounded(x: Tensor) -> Tensor:
    """A bf16 value held in float32."""
    return x.to(BF16).float()


# ---- modulation


def row_tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Shift and scale, four rows of 64; float32 ones (pruned form) are not bf16 values."""
    return normal(4, 64).to(dtype), (normal(4, 64) * 0.3 + 0.1).to(dtype)


@pytest.mark.parametrize("table_dtype", [torch.float32, BF16], ids=["pruned", "full"])
def test_modulation_rounds_like_a_literal_row_by_row_reference(table_dtype: torch.dtype) -> None:
    shift, scale = row_tables(table_dtype)
    y = normal(32, 64).to(BF16)
    want = torch.empty(32, 64)
    for start, stop, table_row in SPANS:
        for row in range(start, stop):
            factor = rounded(1 + rounded(scale[table_row].float()))
            product = rounded(y[row].float() * factor)
            want[row] = rounded(product + rounded(shift[table_row].float()))
    once = (y.float() * (1 + scale.float()[1]) + shift.float()[1]).to(BF16)
    got = Eager().norm_modulate(nn.Identity(), y, shift, scale, SPANS)
    assert torch.equal(got, want.to(BF16))
    assert not torch.equal(got[:5], once[:5]), "the data cannot tell the roundings apart"


def test_the_gated_sum_is_fused_with_one_rounding() -> None:
    x, o, gate = normal(32, 64).to(BF16), normal(64, 32).t().contiguous().to(BF16), normal(4, 64)
    want, twice = torch.empty(32, 64), torch.empty(32, 64)
    for start, stop, table_row in SPANS:
        for row in range(start, stop):
            product = o[row].float() * rounded(gate[table_row])
            want[row] = rounded(x[row].float() + product)
            twice[row] = rounded(x[row].float() + rounded(product))
    got = Eager().gated_add(x, o, gate, SPANS)
    assert torch.equal(got, want.to(BF16))
    assert not torch.equal(got, twice.to(BF16)), "the data cannot tell the roundings apart"
    assert got.data_ptr() == x.data_ptr()


def test_rope_rounds_every_product_and_sum() -> None:
    x, weight = normal(9, 2, 128).to(BF16), (normal(128) * 0.1 + 1).to(BF16)
    angles = normal(9, 48)
    q, k = x.clone(), x.clone()
    Eager().rms_rope(q, k, rope_table(angles, BF16), weight, weight, 1e-5)
    y = torch.nn.functional.rms_norm(x, (128,), weight, 1e-5)
    want = y.clone()
    for row, head, i in itertools.product(range(9), range(2), range(48)):
        cos, sin = rounded(angles[row, i].cos()), rounded(angles[row, i].sin())
        low, high = y[row, head, i].float(), y[row, head, i + 48].float()
        want[row, head, i] = rounded(rounded(cos * low) - rounded(sin * high))
        want[row, head, i + 48] = rounded(rounded(sin * low) + rounded(cos * high))
    assert torch.equal(q, want) and torch.equal(k, want)
    assert torch.equal(q[..., 96:], y[..., 96:])


# ---- AdaLN rows


def rows_of(built: Side, sigma: float) -> tuple[list[float], list[int]]:
    """Times, and the table row of every packed row, from the spans."""
    sigma_v = torch.tensor(sigma)
    rows = step_rows(
        built.inputs.segments, built.text_tags, sigma_v, audio_sigma(sigma_v, 12.0, 3.0)
    )
    table_rows: list[int] = []
    for span in rows.spans:
        assert span.start == len(table_rows) and span.stop > span.start
        table_rows += [span.row] * (span.stop - span.start)
    times = rows.times_M.tolist()
    assert times[rows.video_time] == pytest.approx(1 - sigma, abs=1e-7)
    assert times[rows.audio_time] == pytest.approx(1 - sigma / (4 - 3 * sigma), abs=1e-7)
    return times, table_rows


@pytest.mark.parametrize("sigma", [1.0, 0.7, 0.02, 5e-4])
def test_every_row_gets_the_table_row_of_its_time_and_modality(sigma: float) -> None:
    built = side(denoiser(), MIXED)
    times, table_rows = rows_of(built, sigma)
    t_video, t_audio = 1 - sigma, 1 - sigma / (4 - 3 * sigma)
    want = []
    for segment in built.layout.segments:
        for row in range(segment.start, segment.stop):
            modality = TAGS[row] if segment.kind == "text" else MODALITY[segment.kind]
            time = {
                "text": t_video, "video": t_video, "audio": t_audio,
                "cond": max(t_video, 0.999), "ref_img": max(t_video, 0.999),
                "cond_audio": 1.0, "ref_audio": 1.0,
            }[segment.kind]  # fmt: skip
            index = min(range(len(times)), key=lambda i: abs(times[i] - time))
            assert times[index] == pytest.approx(time, abs=1e-7)
            want.append(index * 3 + modality)
    assert table_rows == want


@pytest.mark.parametrize(
    ("sigma", "count"),
    [(1.0, 3), (0.7, 4), (5e-4, 3)],
    ids=["both streams at 0", "all apart", "the target has passed the conditions"],
)
def test_equal_times_are_merged(sigma: float, count: int) -> None:
    times, _ = rows_of(side(denoiser(), MIXED), sigma)
    assert len(times) == count
    assert times == sorted(set(times))


def test_without_conditions_only_the_times_of_the_streams_are_embedded() -> None:
    assert rows_of(side(denoiser()), 1.0)[0] == [0.0]
    assert len(rows_of(side(denoiser()), 0.5)[0]) == 2


def test_the_conditions_of_a_nearly_clean_target_move_with_it() -> None:
    times, table_rows = rows_of(side(denoiser(), MIXED), 5e-4)
    video, picture = table_rows[-1], table_rows[len(TAGS)]
    assert video == picture
    assert times[video // 3] == pytest.approx(0.9995, abs=1e-7)


@pytest.mark.parametrize("format", ["full_bf16", "pruned_bf16"])
def test_adaln_tables_are_laid_out_by_time_then_modality(format: str) -> None:
    """Contract 1.12: by modality, then vector, then width; SiLU in the full form only."""
    model = denoiser(format)
    adaln = model.blocks[0].get_submodule("adaln_proj")
    t_emb = model.embed_time(torch.tensor([0.2, 0.9]))
    tables = adaln(t_emb)
    width = model.cfg.hidden
    linear = adaln.get_submodule("linear")
    assert isinstance(linear, nn.Linear)
    source = t_emb if format.startswith("pruned") else torch.nn.functional.silu(t_emb)
    flat = linear(source).reshape(2, 3, 6, width)
    for vector, time, modality in itertools.product(range(6), range(2), range(3)):
        assert torch.equal(tables[vector][time * 3 + modality], flat[time, modality, vector])


def test_the_time_table_is_interpolated_between_its_rows() -> None:
    model = denoiser("pruned_bf16")
    table, grid = model.adaln_t_table, model.cfg.curve_grid
    at = torch.tensor([0.0, 0.25 / (grid - 1), 1.0, 1.5])
    got = model.embed_time(at)
    assert torch.equal(got[0], table[0]) and torch.equal(got[2], table[-1])
    assert torch.equal(got[3], table[-1])
    torch.testing.assert_close(got[1], 0.75 * table[0] + 0.25 * table[1])


# ---- attention inputs


def test_attention_gets_q_k_and_v_as_views_of_the_qkv_buffer() -> None:
    seen: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((q, k, v))
        return torch.zeros(1, q.shape[2], q.shape[1] * q.shape[3])

    cfg = H3Config.from_checkpoint(random_checkpoint("dit", size="tiny", format="full_bf16"))
    with torch.no_grad():
        Attention(cfg, attend, Eager())(normal(5, cfg.hidden), None)
        table = rope_table(normal(5, 48), torch.float32)
        Attention(cfg, attend, Eager())(normal(5, cfg.hidden), table)
    width = cfg.num_heads * 128
    q, k, v = seen[3:]  # without rotation the norms make q and k anew
    assert {x.stride() for x in (seen[2], q, k, v)} == {(15 * width, 128, 3 * width, 1)}
    assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == 4 * width


# ---- packing of latents


def literal_rows(latent: Tensor) -> Tensor:
    """Contract 1.5 with one index per number; odd sides wrap around."""
    _, channels, frames, height, width = latent.shape
    rows = []
    for t, i, j in itertools.product(range(frames), range(0, height, 2), range(0, width, 2)):
        cells = itertools.product(range(channels), range(2), range(2))
        rows.append([latent[0, c, t, (i + p) % height, (j + q) % width] for c, p, q in cells])
    return torch.tensor(rows)


@pytest.mark.parametrize("size", [(2, 4, 6), (1, 3, 5), (3, 2, 3), (2, 5, 2), (1, 1, 1)])
def test_patches_are_those_of_the_contract_and_come_back(size: tuple[int, int, int]) -> None:
    latent = normal(1, 3, *size)
    rows = patchify(latent)
    assert torch.equal(rows, literal_rows(latent))
    assert torch.equal(unpatchify(rows, latent.shape), latent)


def test_audio_rows_are_one_channel_after_the_other_and_come_back() -> None:
    latent = normal(1, 32, 2, 7)
    rows = pack_audio(latent)
    for channel, t in itertools.product(range(2), range(7)):
        assert torch.equal(rows[channel * 7 + t], latent[0, :, channel, t])
    assert torch.equal(unpack_audio(rows, latent.shape), latent)


def test_the_packed_buffer_holds_every_segment_in_its_place() -> None:
    model = denoiser()
    built = side(model, MIXED)
    noise = draw_noise(TARGET, 1)
    video, audio = patchify(noise.video), pack_audio(noise.audio)
    inputs = built.inputs
    assert inputs.condition_video is not None and inputs.condition_audio is not None
    packed = model.embed(video, audio, inputs)
    picture = model.video_patch_proj(torch.cat([inputs.condition_video, video]))
    sound = model.audio_patch_proj(torch.cat([inputs.condition_audio, audio]))
    want = torch.empty_like(packed)
    want[: len(TAGS)] = inputs.context_LD
    kinds = [s.kind for s in built.layout.segments for _ in range(s.start, s.stop)]
    want[[i for i, kind in enumerate(kinds) if MODALITY.get(kind) == 0]] = picture
    want[[i for i, kind in enumerate(kinds) if MODALITY.get(kind) == 2]] = sound
    assert torch.equal(packed, want)


@pytest.mark.parametrize("format", ["full_bf16", "pruned_bf16", "pruned_nvfp4", "full_fp8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_forward_gives_float32_rows_of_the_targets_alone(format: str, dtype: str) -> None:
    model = denoiser(format, dtype=dtype)
    built = side(model, MIXED)
    noise = draw_noise(TARGET, 1)
    sigma = torch.tensor(0.6)
    rows = step_rows(built.inputs.segments, built.text_tags, sigma, audio_sigma(sigma, 12.0, 3.0))
    with torch.inference_mode():
        video, audio = model(patchify(noise.video), pack_audio(noise.audio), built.inputs, rows)
    assert video.shape == (12, 96) and audio.shape == (16, 32)
    assert video.dtype == audio.dtype == torch.float32
    assert torch.isfinite(video).all() and torch.isfinite(audio).all()


# ---- loading


def state(format: str, rounding: str) -> dict[str, Tensor]:
    model = denoiser(format, dtype="bf16", island_rounding=rounding)
    return dict(model.state_dict())


@pytest.mark.parametrize("format", ["pruned_nvfp4", "pruned_int8", "full_fp8"])
def test_island_rounding_changes_the_fp32_linears_and_nothing_else(format: str) -> None:
    kept, comfy = state(format, "keep"), state(format, "comfy")
    assert kept.keys() == comfy.keys()
    islands = {name for name in kept if name.startswith(ISLANDS)}
    if format.startswith("pruned"):
        islands |= {name for name in kept if "adaln_proj" in name}
    changed = {name for name in kept if not torch.equal(kept[name].float(), comfy[name].float())}
    assert changed == islands
    for name in islands:
        assert kept[name].dtype == comfy[name].dtype == torch.float32
        assert torch.equal(comfy[name], rounded(kept[name]))


def test_an_unquantised_file_keeps_its_islands_either_way() -> None:
    kept, comfy = state("pruned_bf16", "keep"), state("pruned_bf16", "comfy")
    assert all(torch.equal(kept[name], comfy[name]) for name in kept)
    island = comfy["video_patch_proj.weight"]
    assert not torch.equal(island, rounded(island))


@pytest.mark.parametrize("format", ["full_bf16", "pruned_bf16"])
def test_dtypes_of_an_unquantised_file_in_bf16(format: str) -> None:
    pruned = format.startswith("pruned")
    for name, tensor in state(format, "comfy").items():
        island = name.startswith((*ISLANDS, "adaln_t_table", "rope.inv_freq"))
        want = torch.float32 if island or (pruned and "adaln_proj" in name) else BF16
        assert tensor.dtype == want, name


def test_the_configuration_comes_from_the_shapes() -> None:
    cfg = H3Config.from_checkpoint(random_checkpoint("dit", size="full", format="pruned_nvfp4"))
    assert cfg == H3Config(
        hidden=5376, num_layers=50, num_refiner_layers=2, num_heads=56, head_dim=128, ffn=14336,
        text_dim=5120, video_channels=24, audio_channels=32, num_inv_freq=16, time_dim=8,
        curve_grid=1025, time_hidden=0, frequency_dim=0,
    )  # fmt: skip
    assert cfg.pruned and cfg.rope_dim == 96


def configured(config: object) -> IndexedCheckpoint:
    """The tiny denoiser with this `config` in its header."""
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    checkpoint.metadata = {"config": config if isinstance(config, str) else json.dumps(config)}
    return checkpoint


def test_the_header_s_config_stands_over_the_shapes() -> None:
    plain = H3Config.from_checkpoint(random_checkpoint("dit", size="tiny", format="pruned_bf16"))
    told = {"num_attention_heads": 7, "text_dim": 99, "adaln_curve_grid": None, "norm_eps": 1e-5}
    got = H3Config.from_checkpoint(configured({"transformer": told | {"sigma_shift_video": 3.0}}))
    assert got == replace(plain, num_heads=7, text_dim=99)
    assert H3Config.from_checkpoint(configured({"vae": {"hidden_size": 1}})) == plain


def test_a_size_of_the_config_that_the_tensors_do_not_have_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has shape .* wants \["):
        load_denoiser(configured({"transformer": {"num_attention_heads": 7}}), demo_plan(), CPU)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{half", "config is not JSON"),
        ("[" * 100_000, "config is not JSON"),
        ([1], r"must be an object with an object 'transformer', got \[1\]"),
        ({"transformer": 5}, "must be an object with an object 'transformer'"),
        ({"transformer": {"qk_norm_eps": 1e-6}}, "qk_norm_eps 1e-06; 1e-05 is supported"),
        ({"transformer": {"patch_size": [1, 4, 4]}}, r"patch_size \[1, 4, 4\]; \[1, 2, 2\] is"),
        ({"transformer": {"hidden_size": "5376"}}, "hidden_size '5376'; it must be a whole number"),
        ({"transformer": {"hidden_size": True}}, "hidden_size True; it must be a whole number"),
        ({"transformer": {"num_layers": 0}}, "num_layers 0; it must be a whole number of at least"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_in_one_sentence(config: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        H3Config.from_checkpoint(configured(config))


def test_a_file_without_the_patch_projections_is_no_denoiser() -> None:
    with pytest.raises(CheckpointError, match="not an H3 denoiser"):
        H3Config.from_checkpoint(random_checkpoint("audio_vae", size="tiny", format="fp32"))


def test_loading_reports_progress_up_to_the_whole_file() -> None:
    checkpoint = random_checkpoint("dit", size="tiny", format="pruned_bf16")
    seen: list[tuple[int, int]] = []
    model, report = load_denoiser(
        checkpoint, demo_plan(), CPU, lambda done, total: seen.append((done, total))
    )
    assert isinstance(model, H3Model)
    assert seen[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
