"""Token layout, tags, positions, preprocessing and packed weights of the text encoder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.cancel import Cancelled
from runtime.checkpoints.base import CheckpointError, LayerQuant, PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.sizes import vision_size
from runtime.h3.text import (
    TextAudio,
    TextContext,
    TextEncoder,
    TextImage,
    TextVideo,
    VisionBlock,
    lay_out,
    presentation_tokens,
)
from runtime.h3.text_layers import rope_tables
from runtime.h3.text_linear import DequantisedLinear, PackedEmbedding
from runtime.h3.text_vision import patchify, position_rows
from runtime.h3.tokenizer import Tokenizer

CPU = torch.device("cpu")
TAPS = (0, 1, 2)
IMAGE_PAD = 151655


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(None)


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    checkpoint = random_checkpoint("text_encoder", size="tiny", format="bf16", seed=3)
    return TextEncoder(checkpoint, device="cpu", deepstack_layers=TAPS)


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    torch.manual_seed(11)
    yield


def picture(height: int = 64, width: int = 96) -> TextImage:
    return TextImage(pixels=torch.rand(height, width, 3))


def clip(times: tuple[float, ...], height: int = 64, width: int = 64) -> TextVideo:
    return TextVideo(frames=torch.rand(len(times), height, width, 3), timestamps=times)


def shown(tokens: tuple[int | VisionBlock, ...]) -> list[int | str]:
    return [t if isinstance(t, int) else "block" for t in tokens]


def blocks(tokens: tuple[int | VisionBlock, ...]) -> list[VisionBlock]:
    return [t for t in tokens if isinstance(t, VisionBlock)]


# ---- presentation


def test_a_presentation_lists_items_in_order_with_a_counter_per_kind(tokenizer: Tokenizer) -> None:
    items = (picture(), TextAudio(), clip((0.0, 0.5)), TextAudio(), picture())
    pieces = (
        ["<Picture 1>: ", None],
        ["<Audio 1>: "],
        ["<Video 1>: ", "<0.2 seconds>", None],
        ["<Audio 2>: "],
        ["<Picture 2>: ", None],
        ["both"],
    )
    want: list[int | str] = []
    for piece in (p for group in pieces for p in group):
        want += [151652, "block", 151653] if piece is None else tokenizer.encode(piece)
    assert shown(presentation_tokens(items, "both", tokenizer)) == want


def test_an_empty_presentation_is_one_token(tokenizer: Tokenizer) -> None:
    assert presentation_tokens((), "", tokenizer) == (151643,)


def test_an_empty_prompt_with_a_reference_adds_nothing(tokenizer: Tokenizer) -> None:
    tokens = presentation_tokens((TextAudio(),), "", tokenizer)
    assert list(tokens) == tokenizer.encode("<Audio 1>: ")


def test_labels_and_prompt_do_not_merge_across_their_border(tokenizer: Tokenizer) -> None:
    tokens = presentation_tokens((TextAudio(),), "song", tokenizer)
    apart = tokenizer.encode("<Audio 1>: ") + tokenizer.encode("song")
    assert list(tokens) == apart != tokenizer.encode("<Audio 1>: song")


def test_a_clip_of_124_frames_has_six_labelled_blocks(tokenizer: Tokenizer) -> None:
    times = tuple(i / 2 for i in range(11))  # frames 0, 12 .. 120 (contract B10)
    labels = [f"<{t} seconds>" for t in ("0.2", "1.2", "2.2", "3.2", "4.2", "5.0")]
    want: list[int | str] = [*tokenizer.encode("<Video 1>: ")]
    for label in labels:
        want += [*tokenizer.encode(label), 151652, "block", 151653]
    assert shown(presentation_tokens((clip(times),), "", tokenizer)) == want


def test_an_odd_number_of_frames_repeats_the_last_one(tokenizer: Tokenizer) -> None:
    video = clip((0.0, 0.5, 1.0))
    first, second = blocks(presentation_tokens((video,), "", tokenizer))
    assert torch.equal(first.frames, video.frames[:2])
    assert torch.equal(second.frames, video.frames[[2, 2]])


def test_a_video_without_a_timestamp_per_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2 frames and 1 timestamps"):
        TextVideo(frames=torch.rand(2, 32, 32, 3), timestamps=(0.0,))


# ---- layout: positions, tags, splice


def test_tags_are_vision_on_the_span_and_one_token_on_each_side(tokenizer: Tokenizer) -> None:
    tokens = presentation_tokens((picture(),), "two words", tokenizer)
    tags = lay_out(tokens, [(4, 6)], CPU).tags
    assert tags.tolist() == [1] * 6 + [0] * (1 + 6 + 1) + [1] * 2


def test_positions_count_on_through_a_block_by_its_longer_side() -> None:
    block = VisionBlock(frames=torch.empty(1, 64, 96, 3), is_video=False)
    sequence = lay_out((5, 151652, block, 151653, 6), [(4, 6)], CPU)
    assert sequence.positions.t().tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        *[[2, 2 + row, 2 + column] for row in range(2) for column in range(3)],
        [5, 5, 5],
        [6, 6, 6],
    ]
    assert sequence.spans == ((2, 6),)


def test_rope_sections_are_24_20_20_at_large_coordinates() -> None:
    coordinates = (1000.0, 25_000.0, 90_000.0)  # t, h, w: the goldens are too short to tell
    cos, sin = rope_tables(torch.tensor(coordinates)[:, None])
    alone = [rope_tables(torch.full((3, 1), c)) for c in coordinates]
    sections = [0, 0, 0]
    for j in range(64):
        axis = 1 if j in range(1, 59, 3) else 2 if j in range(2, 60, 3) else 0
        sections[axis] += 1
        assert len({float(table[0, j]) for _, table in alone}) == 3, j
        for half in (j, j + 64):
            assert cos[0, half] == alone[axis][0][0, half], j
            assert sin[0, half] == alone[axis][1][0, half], j
    assert sections == [24, 20, 20]


def test_rope_turns_frequency_j_by_position_over_5e6_to_the_j_64th() -> None:
    position = torch.arange(7.0)
    cos, sin = rope_tables(position.expand(3, 7))
    angle = position.double()[:, None] / 5e6 ** (torch.arange(64).double() / 64)
    torch.testing.assert_close(cos.double(), angle.cos().repeat(1, 2), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin.double(), angle.sin().repeat(1, 2), rtol=0, atol=1e-6)


def test_a_typed_image_pad_stays_text(encoder: TextEncoder, tokenizer: Tokenizer) -> None:
    prompt = "<|image_pad|> here"
    tokens = presentation_tokens((picture(),), prompt, tokenizer)
    assert tokens.count(IMAGE_PAD) == 1
    taps: dict[str, Tensor] = {}
    result = encoder.encode(tokens, on_layer=taps.__setitem__)
    length = 6 + 1 + 6 + 1 + len(tokenizer.encode(prompt))
    assert result.context.shape == (1, length, 16)
    assert result.token_tags[-2:].tolist() == [1, 1]
    alone: dict[str, Tensor] = {}
    encoder.encode(tuple(tokenizer.encode(prompt)), on_layer=alone.__setitem__)
    assert torch.equal(taps["embeds"][0, 14:], alone["embeds"][0])
    assert torch.equal(taps["embeds"][0, 7:13], taps["vision_0/merged"])


def test_deepstack_features_are_added_to_the_vision_tokens_after_the_tap(
    encoder: TextEncoder, tokenizer: Tokenizer
) -> None:
    tokens = presentation_tokens((picture(), picture(64, 64)), "hi", tokenizer)
    taps: dict[str, Tensor] = {}
    encoder.encode(tokens, on_layer=taps.__setitem__)
    sequence = lay_out(tokens, [(4, 6), (4, 4)], CPU)
    feature = torch.cat([taps["vision_0/deepstack_1"], taps["vision_1/deepstack_1"]])
    x = taps["layer_01"].clone()
    x[0, ~sequence.is_text] += feature
    got: dict[str, Tensor] = {}
    encoder.run_layers(x, sequence, [], tap=got.__setitem__, layers=range(2, 3))
    assert torch.equal(got["layer_02"], taps["layer_02"])
    assert feature.abs().max() > 0


# ---- encoder


def encoded(encoder: TextEncoder, prompt: str, tokenizer: Tokenizer) -> TextContext:
    return encoder.encode(presentation_tokens((), prompt, tokenizer))


def test_the_context_is_the_unnormalised_residual_after_layer_49(
    encoder: TextEncoder, tokenizer: Tokenizer
) -> None:
    taps: dict[str, Tensor] = {}
    tokens = presentation_tokens((), "a fox", tokenizer)
    result = encoder.encode(tokens, on_layer=taps.__setitem__)
    assert torch.equal(result.context, taps["layer_49"])
    assert (result.context.dtype, result.context.device) == (torch.float32, CPU)
    assert result.token_tags.tolist() == [1, 1]
    assert "layer_50" not in taps and "mrope_position_ids" not in taps


def test_a_prompt_never_sees_what_follows_it(encoder: TextEncoder, tokenizer: Tokenizer) -> None:
    short, long = (encoded(encoder, p, tokenizer).context for p in ("a fox", "a fox in snow"))
    torch.testing.assert_close(long[:, :2], short, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(long[:, 2], short[:, 1])


def test_pictures_reach_the_context_in_their_order(
    encoder: TextEncoder, tokenizer: Tokenizer
) -> None:
    one, two = picture(64, 64), picture(64, 64)
    contexts = [
        encoder.encode(presentation_tokens(items, "x", tokenizer)).context
        for items in ((one, two), (two, one))
    ]
    assert not torch.allclose(*contexts)


def test_cancel_stops_between_layers(encoder: TextEncoder, tokenizer: Tokenizer) -> None:
    seen: list[str] = []
    with pytest.raises(Cancelled):
        encoder.encode(
            presentation_tokens((), "a fox", tokenizer),
            on_layer=lambda name, tensor: seen.append(name),
            cancelled=lambda: "layer_01" in seen,
        )
    assert seen == ["embeds", "layer_00", "layer_01"]


@pytest.mark.parametrize("format", ["bf16", "nvfp4_awq"])
def test_the_full_size_layout_fits_and_stays_as_stored(format: str) -> None:
    checkpoint = random_checkpoint("text_encoder", size="full", format=format)
    encoder = TextEncoder(checkpoint, device="meta", deepstack_layers=(8, 16, 24))
    assert encoder.load.bytes == sum(
        checkpoint.dtype(name).itemsize * torch.Size(checkpoint.shape(name)).numel()
        for name in checkpoint.names()
    )
    named = dict(encoder.modules.named_parameters()) | dict(encoder.modules.named_buffers())
    assert named["visual.pos_embed.weight"].dtype == torch.bfloat16
    assert named["visual.blocks.26.attn.qkv.weight"].dtype == torch.float32
    stored = named["model.layers.49.mlp.down_proj.weight"]
    assert stored.dtype == (torch.bfloat16 if format == "bf16" else torch.uint8)


@pytest.mark.parametrize("taps", [(0, 1, 4), (1, 1, 2), (2, 1, 0), (-1, 1, 2)])
def test_deepstack_layers_outside_the_tower_are_refused(taps: tuple[int, int, int]) -> None:
    checkpoint = random_checkpoint("text_encoder", size="tiny", format="bf16")
    with pytest.raises(CheckpointError, match="three rising vision blocks below 4"):
        TextEncoder(checkpoint, device="cpu", deepstack_layers=taps)


# ---- pictures


@pytest.mark.parametrize(
    ("side", "want"),
    [
        ((64, 96), (64, 96)),
        ((50, 70), (64, 64)),
        ((32, 64), (64, 96)),  # below 3,136 pixels
        ((56, 56), (64, 64)),  # exactly 3,136, rounded up anyway
        ((16, 16), (64, 64)),
        ((48, 80), (64, 64)),  # halves round to even
        ((3584, 3584), (3584, 3584)),  # exactly 12,845,056
        ((3616, 3584), (3584, 3552)),
        ((2048, 8192), (1792, 7168)),
    ],
)
def test_sides_are_multiples_of_32_within_the_pixel_limits(
    side: tuple[int, int], want: tuple[int, int]
) -> None:
    got = vision_size(*side)
    assert got == want
    assert 3136 <= got[0] * got[1] <= 12_845_056


def test_patches_stand_in_merge_blocks_with_channel_frame_row_column_values() -> None:
    frames = torch.rand(2, 64, 96, 3)
    patches, grid = patchify(frames)
    assert grid == (4, 6) and patches.shape == (24, 3 * 2 * 16 * 16)
    for patch, (row, column) in ((0, (0, 0)), (1, (0, 1)), (2, (1, 0)), (4, (0, 2)), (23, (3, 5))):
        area = frames[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        want = (area.permute(3, 0, 1, 2) - 0.5) / 0.5
        assert torch.equal(patches[patch], want.flatten()), patch


def test_an_image_stands_twice_in_its_patches() -> None:
    frame = torch.rand(1, 64, 64, 3)
    assert torch.equal(patchify(frame)[0], patchify(frame.repeat(2, 1, 1, 1))[0])


def test_position_rows_round_every_product_to_the_stored_dtype() -> None:
    table = torch.randn(48 * 48, 8).bfloat16()
    rows = position_rows(table, 4, 6)
    assert rows.dtype == torch.bfloat16
    exact = position_rows(table.float(), 4, 6)
    assert torch.equal(rows[0], table[0]) and torch.equal(rows[-1], table[-1])
    assert not torch.equal(rows.float(), exact)
    torch.testing.assert_close(rows.float(), exact, rtol=0.05, atol=0.05)


# ---- packed weights


def nvfp4(rows: int, columns: int, pre_scale: Tensor | None) -> tuple[PackedWeight, Tensor]:
    """A random NVFP4 layer and its fp32 weight, unpacked here from the format's definition."""
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (rows, columns))
    scale_2 = torch.tensor(0.037)
    tiles_wide = -(-(columns // 16) // 4)
    swizzled = torch.zeros(-(-rows // 128) * 128 * tiles_wide * 4)
    plain = (torch.rand(rows, columns // 16) * 4 + 0.5).to(torch.float8_e4m3fn).float()
    for r in range(rows):
        for c in range(columns // 16):
            tile = (r // 128) * tiles_wide + c // 4
            swizzled[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = plain[r, c]
    values = levels[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    weight = values * (scale_2 * plain).repeat_interleave(16, dim=1)
    tensors = {
        "weight": (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8),
        "weight_scale": swizzled.view(-1, 4 * tiles_wide).to(torch.float8_e4m3fn),
        "weight_scale_2": scale_2,
    }
    if pre_scale is not None:
        tensors["pre_quant_scale"] = pre_scale
    packed = PackedWeight(
        layer="q", quant=LayerQuant(format="nvfp4"), shape=(rows, columns), tensors=tensors
    )
    return packed, weight


@pytest.mark.parametrize("awq", [False, True])
def test_a_packed_linear_scales_its_input_and_multiplies_in_fp32(awq: bool) -> None:
    pre_scale = (torch.rand(80) + 0.5).bfloat16() if awq else None
    packed, weight = nvfp4(144, 80, pre_scale)
    x = torch.randn(1, 5, 80)
    want = F.linear(x * pre_scale.float() if pre_scale is not None else x, weight)
    got = DequantisedLinear(packed)(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("group", [0, 64])
def test_an_int8_linear_is_dequantised_and_turned_back(group: int) -> None:
    weight = torch.randn(24, 128)
    stored = weight
    if group:
        h4 = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
        h = torch.kron(torch.kron(h4, h4), h4) / 8
        stored = (weight.view(24, 2, 64) @ h.t()).view(24, 128)
    scale = stored.abs().amax(dim=1, keepdim=True) / 127
    packed = PackedWeight(
        layer="q",
        quant=LayerQuant(format="int8_tensorwise", convrot_group=group),
        shape=(24, 128),
        tensors={"weight": (stored / scale).round().to(torch.int8), "weight_scale": scale},
    )
    x = torch.randn(7, 128)
    got, want = DequantisedLinear(packed)(x), F.linear(x, weight)
    assert (got - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("format", ["float8_e4m3fn", "float8_e5m2", "int8_tensorwise"])
def test_embedding_rows_are_value_times_scale_in_fp32(format: str) -> None:
    if format == "int8_tensorwise":
        weight = torch.randint(-127, 128, (9, 16), dtype=torch.int8)
        scale = torch.rand(9, 1)
    else:
        weight = torch.randn(9, 16).to(getattr(torch, format))
        scale = torch.rand(())
    packed = PackedWeight(
        layer="model.embed_tokens",
        quant=LayerQuant(format=format),
        shape=(9, 16),
        tensors={"weight": weight, "weight_scale": scale},
    )
    ids = torch.tensor([4, 0, 8, 4])
    assert torch.equal(PackedEmbedding(packed)(ids), (weight.float() * scale)[ids])


def test_an_nvfp4_embedding_is_refused() -> None:
    packed, _ = nvfp4(16, 16, None)
    with pytest.raises(CheckpointError, match="embedding q is stored as nvfp4"):
        PackedEmbedding(packed)(torch.tensor([0]))


def stored_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def test_encoding_leaves_packed_weights_packed(tokenizer: Tokenizer) -> None:
    checkpoint = random_checkpoint("text_encoder", size="tiny", format="nvfp4_awq", seed=5)
    encoder = TextEncoder(checkpoint, device="cpu", deepstack_layers=TAPS)
    before = {name: buffer.clone() for name, buffer in encoder.modules.named_buffers()}
    context = encoder.encode(presentation_tokens((picture(),), "a fox", tokenizer)).context
    assert torch.isfinite(context).all()
    after = dict(encoder.modules.named_buffers())
    assert sum(buffer.dtype == torch.uint8 for buffer in after.values()) == 350
    for name, buffer in after.items():
        assert torch.equal(stored_bytes(buffer), stored_bytes(before[name])), name
