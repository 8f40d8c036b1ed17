"""The video VAE: tiles, joins, streaming, cancelling, and what it refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runtime.cancel import Cancelled
from runtime.checkpoints.base import Checkpoint, CheckpointError
from runtime.checkpoints.demo import random_checkpoint
from runtime.h3.sizes import num_frames
from runtime.h3.video_decode import DECODE_STAGE, Chunk, in_flight, to_bytes
from runtime.h3.video_decoder import rotary_frequencies, rotary_table
from runtime.h3.video_tiles import (
    CLIP_FRAMES,
    OVERLAP_FRAMES,
    TILE_OVERLAP,
    TILE_SIZE,
    Split,
    Tap,
    blend,
    join_clips,
    join_tiles,
    num_chunks,
    split,
)
from runtime.h3.video_vae import ENCODE_STAGE, VideoVAE, load_video_vae
from runtime.kernels.attention import Attend, AttentionOptions, attention_backend
from runtime.nonfinite import NonFinite

CPU = torch.device("cpu")
SDPA = attention_backend("sdpa").load(CPU, AttentionOptions())


def load(
    *, dtype: torch.dtype = torch.float32, format: str = "fp16", attend: Attend = SDPA
) -> VideoVAE:
    checkpoint = random_checkpoint("video_vae", size="tiny", format=format)
    return load_video_vae(checkpoint, device=CPU, dtype=dtype, attend=attend)[0]


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    return load()


def latent(tokens: int, height: int = 2, width: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(1, 24, tokens, height, width, generator=generator)


def pictures(frames: int, height: int = 32, width: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.rand(frames, height, width, 3, generator=generator)


# ---- joins in time


def frame_numbers(start: int, tokens: int, offset: float = 0.0) -> Tensor:
    """A decoder's raw clip whose pixels are the numbers of the frames that they show."""
    first = start // 5 * 17 - 3
    raw = []
    for token in range(tokens):
        group, place = divmod(token, 5)
        raw += [first + 17 * group + 4 * place + k for k in range(4)]
    return torch.tensor(raw, dtype=torch.float32).view(1, 1, -1, 1, 1) + offset


def joined(decode: Callable[[int, int], Tensor], tokens: int) -> Tensor:
    return torch.cat(list(join_clips(decode, tokens)), dim=2).flatten()


@pytest.mark.parametrize("tokens", [2, 5, 7, 9, 12, 37, 107])
def test_frames_come_out_once_each_and_in_order(tokens: int) -> None:
    video = joined(frame_numbers, tokens)
    assert video.tolist() == pytest.approx(list(range(num_frames(tokens))), abs=1e-4)


def test_a_join_fades_over_five_frames_and_starts_with_the_earlier_clip() -> None:
    video = joined(lambda s, n: frame_numbers(s, n, offset=1000.0 * (s // 5)), 37)
    clip = (video - torch.arange(124)) / 1000
    for i in range(1, 7):
        steps = clip[17 * i : 17 * i + OVERLAP_FRAMES] - (i - 1)
        assert steps.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=1e-4)
        assert clip[17 * i + 5 : 17 * i + 17].tolist() == pytest.approx([i] * 12, abs=1e-4)
    assert clip[119:].tolist() == pytest.approx([6] * 5, abs=1e-4)  # the last tail is not faded


@pytest.mark.parametrize(
    ("tokens", "frames"),
    [(1, 1), (2, 5), (3, 9), (4, 13), (5, 17), (6, 18), (7, 22), (9, 30), (37, 124), (107, 362)],
)
def test_frames_from_padding_are_cut(tokens: int, frames: int) -> None:
    assert num_frames(tokens) == frames
    assert joined(frame_numbers, tokens).numel() == frames


def test_a_single_latent_is_the_last_frame_of_its_own_clip() -> None:
    assert joined(lambda s, n: torch.arange(4.0).view(1, 1, 4, 1, 1), 1).tolist() == [3.0]


def reusing(decode: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    """A decoder that writes every clip into the same memory, as a CUDA graph does."""
    canvas = torch.empty(1, 1, 28, 1, 1)
    return lambda start, tokens: canvas.copy_(decode(start, tokens))


def test_tails_survive_a_decoder_that_reuses_its_memory() -> None:
    def decode(start: int, tokens: int) -> Tensor:
        return frame_numbers(start, tokens, offset=1000.0 * (start // 5))

    reused = [part.clone() for part in join_clips(reusing(decode), 37)]
    assert torch.equal(torch.cat(reused, dim=2).flatten(), joined(decode, 37))


def test_a_tail_kept_as_a_view_would_show_in_the_joins() -> None:
    decode = reusing(lambda s, n: frame_numbers(s, n, offset=1000.0 * (s // 5)))
    tail = decode(0, 7)[:, :, -OVERLAP_FRAMES:]
    head = decode(5, 7)[:, :, 3 : 3 + CLIP_FRAMES]
    first = blend(tail, head, OVERLAP_FRAMES, -3).flatten()[0]
    assert first == 1000 + 17 + 17  # the second clip's own tail, 17 frames later: contract 6.7


def test_a_tail_does_not_keep_its_clip_alive() -> None:
    clips: list[weakref.ref[Tensor]] = []

    def decode(start: int, tokens: int) -> Tensor:
        raw = frame_numbers(start, tokens)
        clips.append(weakref.ref(raw))
        return raw

    alive = []
    for part in join_clips(decode, 37):
        del part
        alive.append(sum(clip() is not None for clip in clips))
    assert max(alive) == 1


def test_blend_writes_into_neither_operand() -> None:
    a, b = torch.rand(1, 3, 5, 4, 4), torch.rand(1, 3, 17, 4, 4)
    copies = a.clone(), b.clone()
    out = blend(a, b, 5, -3)
    assert torch.equal(a, copies[0]) and torch.equal(b, copies[1])
    assert out.untyped_storage().data_ptr() not in (
        a.untyped_storage().data_ptr(),
        b.untyped_storage().data_ptr(),
    )


def test_the_first_blended_line_is_the_earlier_side_exactly() -> None:
    a, b = torch.rand(1, 3, 5, 4, 4), torch.rand(1, 3, 17, 4, 4)
    assert torch.equal(blend(a, b, 5, -3)[:, :, 0], a[:, :, 0])


# ---- tiles


def test_the_tile_size_is_a_constant_of_the_model() -> None:
    assert (TILE_SIZE, TILE_OVERLAP) == (256, 64)


@pytest.mark.parametrize(
    ("length", "starts", "overlaps"),
    [
        (32, (0,), ()),
        (256, (0,), ()),
        (272, (0, 16), (240,)),
        (480, (0, 112, 224), (144, 144)),
        (544, (0, 144, 288), (112, 112)),
        (768, (0, 160, 336, 512), (96, 80, 80)),
        (960, (0, 176, 352, 528, 704), (80, 80, 80, 80)),
        (1344, (0, 176, 352, 528, 704, 896, 1088), (80, 80, 80, 80, 64, 64)),
    ],
)
def test_split_gives_the_tiles_of_the_contract(
    length: int, starts: tuple[int, ...], overlaps: tuple[int, ...]
) -> None:
    tiles = split(length)
    assert (tiles.starts, tiles.overlaps) == (starts, overlaps)
    assert tiles.starts[-1] + tiles.sizes[-1] == length


@pytest.mark.parametrize("length", range(272, 2064, 16))
def test_tiles_cover_every_length_with_at_least_the_least_overlap(length: int) -> None:
    tiles = split(length)
    assert tiles.starts[-1] + tiles.sizes[-1] == length
    assert min(tiles.overlaps) >= TILE_OVERLAP
    assert set(tiles.sizes) == {TILE_SIZE}


def test_neighbours_are_blended_raw_above_before_left() -> None:
    value = {(0, 0): 1.0, (0, 16): 20.0, (16, 0): 300.0, (16, 16): 4000.0}

    def tile(rows: slice, columns: slice) -> Tensor:
        return torch.full((1, 1, 1, 256, 256), value[rows.start, columns.start])

    tiles = Split(starts=(0, 16), sizes=(256, 256), overlaps=(240,))
    canvas = join_tiles(tile, tiles, tiles, 1)[0, 0, 0]
    assert canvas.shape == (272, 272)
    for y, x in ((16, 16), (100, 30), (30, 200), (255, 255), (260, 260)):
        down, right = min((y - 16) / 240, 1), min((x - 16) / 240, 1)
        upper, lower = value[0, 16], value[16, 16]
        column = upper * (1 - down) + lower * down
        assert canvas[y, x].item() == pytest.approx(300 * (1 - right) + column * right, rel=1e-5)


def test_tiles_survive_a_decoder_that_reuses_its_memory() -> None:
    canvas = torch.empty(1, 1, 1, 256, 256)

    def tile(rows: slice, columns: slice) -> Tensor:
        generator = torch.Generator().manual_seed(rows.start * 1000 + columns.start)
        return torch.rand(1, 1, 1, 256, 256, generator=generator)

    tiles = split(400)
    want = join_tiles(tile, tiles, tiles, 1)
    assert torch.equal(join_tiles(lambda y, x: canvas.copy_(tile(y, x)), tiles, tiles, 1), want)


class Blank(nn.Module):
    """Stands in for the ViT: raw pixels of the right size, no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, z: Tensor, on_tap: object) -> Tensor:
        del on_tap
        self.calls += 1
        t, h, w = z.shape[2:]
        return torch.zeros(1).expand(1, 3, 4 * t, 16 * h, 16 * w)


def test_the_usual_size_takes_105_decoder_calls() -> None:
    vae = load()
    vae.decoder = Blank()
    totals: list[int] = []
    stream = vae.decode_stream(
        latent(37, 34, 60),
        cancelled=lambda: bool(totals),
        on_tile=lambda done, total: totals.append(total),
    )
    with pytest.raises(Cancelled):
        next(stream)
    assert totals == [105]
    assert num_chunks(37) * len(split(960)) * len(split(544)) == 105


def test_progress_counts_every_decoder_call() -> None:
    vae = load()
    vae.decoder = blank = Blank()
    seen: list[tuple[int, int]] = []
    vae.decode(latent(9, 18, 2), on_tile=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 4) for i in range(4)]
    assert blank.calls == 4


def test_cancelling_stops_before_the_next_tile() -> None:
    vae = load()
    vae.decoder = blank = Blank()
    with pytest.raises(Cancelled):
        vae.decode(latent(12, 18, 2), cancelled=lambda: blank.calls == 3)
    assert blank.calls == 3


def test_cancelling_stops_an_encode_too(vae: VideoVAE) -> None:
    seen: list[int] = []
    with pytest.raises(Cancelled):
        vae.encode(
            pictures(39),
            cancelled=lambda: len(seen) == 2,
            on_tile=lambda done, _: seen.append(done),
        )
    assert seen == [1, 2]


# ---- batches of tiles


def wide(tokens: int = 12) -> Tensor:
    """Two clips of two tiles each (12 latents)."""
    return latent(tokens, 18, 2)


@pytest.mark.parametrize("format", ["fp16", "int8_convrot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tiles", [2, 3, 64])
def test_a_batch_of_tiles_gives_the_bits_of_one_by_one(
    tiles: int, dtype: torch.dtype, format: str
) -> None:
    vae = load(dtype=dtype, format=format)
    want = vae.decode(wide())
    vae.tiles = tiles
    assert torch.equal(vae.decode(wide()), want)


def test_batches_run_across_rows_and_clips() -> None:
    vae = load()
    batches: list[int] = []
    decoder = vae.decoder

    def counted(z: Tensor, on_tap: Tap | None) -> Tensor:
        batches.append(z.shape[0])
        return decoder(z, on_tap)

    vae.decoder = Called(counted)
    vae.tiles = 3
    seen: list[tuple[int, int]] = []
    vae.decode(wide(), on_tile=lambda done, total: seen.append((done, total)))
    assert batches == [3, 1]
    assert seen == [(i + 1, 4) for i in range(4)]


class Called(nn.Module):
    """A decoder that is a function."""

    def __init__(self, call: Callable[[Tensor, Tap | None], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, z: Tensor, on_tap: Tap | None) -> Tensor:
        return self.call(z, on_tap)


def test_taps_of_a_batch_are_those_of_single_tiles() -> None:
    vae = load()
    taps: list[dict[str, Tensor]] = []
    for tiles in (1, 4):
        found: dict[str, Tensor] = {}
        vae.tiles = tiles
        vae.decode(wide(7), on_tap=found.__setitem__)
        taps.append(found)
    assert list(taps[0]) and set(taps[0]) == set(taps[1])
    assert all(torch.equal(taps[1][name], x) for name, x in taps[0].items())


def test_cancelling_stops_before_the_next_batch() -> None:
    vae = load()
    vae.decoder = blank = Blank()
    vae.tiles = 2
    with pytest.raises(Cancelled):
        vae.decode(latent(12, 18, 2), cancelled=lambda: blank.calls == 1)
    assert blank.calls == 1


# ---- on the way to the host


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_chunks_in_flight_are_waited_for_in_order_and_few(ahead: int) -> None:
    events: list[str] = []

    class Sent(Chunk):
        def __init__(self, name: str) -> None:
            self.name = name
            events.append(f"start {name}")

        def wait(self) -> Tensor:
            events.append(f"wait {self.name}")
            return torch.zeros(1)

    raw = (torch.tensor(i) for i in range(4))
    chunks = in_flight(raw, lambda pixels: Sent(str(pixels.item())), ahead)
    assert len(list(chunks)) == 4
    assert [e for e in events if e.startswith("wait")] == [f"wait {i}" for i in range(4)]
    assert events.index("wait 0") == ahead + 1
    assert events.index("wait 1") - events.index(f"start {ahead + 1}") == 1


def test_bytes_are_the_floats_rounded_half_up_as_the_mp4_rounds(vae: VideoVAE) -> None:
    floats = vae.decode(latent(12)).numpy()
    chunks = torch.cat(list(vae.decode_stream(latent(12), as_bytes=True))).numpy()
    assert chunks.dtype == np.uint8 and chunks.flags.c_contiguous
    assert np.array_equal(chunks, (np.clip(floats, 0, 1) * 255 + 0.5).astype(np.uint8))


def test_every_byte_is_reached_and_halves_go_up() -> None:
    steps = np.arange(0, 256 * 64, dtype=np.float32) / np.float32(255 * 64)
    steps = np.clip(np.append(steps, np.arange(511, dtype=np.float32) / 510), 0, 1)
    want = (steps * 255 + 0.5).astype(np.uint8)
    assert set(want) == set(range(256))
    assert np.array_equal(to_bytes(torch.from_numpy(steps.copy())).numpy(), want)


# ---- streaming


def test_streamed_chunks_are_the_decoded_video(vae: VideoVAE) -> None:
    z = latent(12)
    chunks = list(vae.decode_stream(z))
    assert [len(chunk) for chunk in chunks] == [17, 17, 5]
    video = vae.decode(z)
    assert torch.equal(torch.cat(chunks), video)
    assert video.shape == (39, 32, 32, 3)
    assert video.dtype == torch.float32
    assert video.min() >= 0 and video.max() <= 1


def test_a_chunk_is_final_when_it_is_yielded(vae: VideoVAE) -> None:
    kept = [(chunk, chunk.clone()) for chunk in vae.decode_stream(latent(12))]
    assert all(torch.equal(chunk, copy) for chunk, copy in kept)


def test_streaming_never_holds_the_whole_clip(vae: VideoVAE) -> None:
    chunks: list[weakref.ref[Tensor]] = []
    most = 0
    for chunk in vae.decode_stream(latent(22)):
        chunks.append(weakref.ref(chunk))
        assert chunk.untyped_storage().nbytes() == chunk.numel() * 4
        del chunk
        most = max(most, sum(ref() is not None for ref in chunks))
    assert len(chunks) == 5
    assert most == 1  # the one that the generator has just handed out


@pytest.mark.parametrize(("tokens", "frames"), [(1, 1), (3, 9), (4, 13), (6, 18), (9, 30)])
def test_latents_off_the_grid_give_their_frames(vae: VideoVAE, tokens: int, frames: int) -> None:
    assert vae.decode(latent(tokens)).shape == (frames, 32, 32, 3)


@pytest.mark.parametrize(("tokens", "grid"), [(3, 7), (9, 12)])
def test_missing_latents_repeat_the_last_one(vae: VideoVAE, tokens: int, grid: int) -> None:
    z = latent(tokens)
    padded = torch.cat((z, z[:, :, -1:].expand(-1, -1, grid - tokens, -1, -1)), dim=2)
    assert torch.equal(vae.decode(z), vae.decode(padded)[: num_frames(tokens)])


def test_the_input_latent_is_left_alone(vae: VideoVAE) -> None:
    z = latent(3)
    before = z.clone()
    vae.decode(z)
    assert torch.equal(z, before)


# ---- encode


@pytest.mark.parametrize(
    ("frames", "tokens"), [(1, 1), (5, 2), (17, 2), (18, 7), (20, 7), (22, 7), (39, 12)]
)
def test_frames_give_their_latents(vae: VideoVAE, frames: int, tokens: int) -> None:
    z = vae.encode(pictures(frames))
    assert z.shape == (1, 24, tokens, 2, 2)
    assert z.dtype == torch.float32


def test_a_short_last_clip_repeats_its_last_frame(vae: VideoVAE) -> None:
    frames = pictures(20)
    padded = torch.cat((frames, frames[-1:].expand(14, -1, -1, -1)))
    assert torch.equal(vae.encode(frames), vae.encode(padded))


def test_odd_sides_are_cropped_around_the_centre(vae: VideoVAE) -> None:
    frames = pictures(1, 45, 70)
    assert torch.equal(vae.encode(frames), vae.encode(frames[:, 6:38, 3:67]))


def test_clips_do_not_see_each_other(vae: VideoVAE) -> None:
    frames = pictures(39)
    changed = frames.clone()
    changed[17:] = 0.5
    assert torch.equal(vae.encode(changed)[:, :, :5], vae.encode(frames)[:, :, :5])


def test_wide_pictures_are_encoded_in_tiles(vae: VideoVAE) -> None:
    totals: list[int] = []
    z = vae.encode(pictures(1, 32, 288), on_tile=lambda done, total: totals.append(total))
    assert totals == [2, 2]
    assert z.shape == (1, 24, 1, 2, 18)


# ---- numbers


def test_fp16_rounds_the_buffers_too() -> None:
    vae = load(dtype=torch.float16)
    assert vae.pixel_mean.tolist() == [0.485107421875, 0.4560546875, 0.406005859375]
    assert vae.decoder.inv_freq[2].item() == 0.316162109375
    assert {buffer.dtype for buffer in vae.buffers()} == {torch.float16}
    assert {parameter.dtype for parameter in vae.parameters()} == {torch.float16}


def test_fp16_decodes_close_to_fp32(vae: VideoVAE) -> None:
    z = latent(2)
    assert (load(dtype=torch.float16).decode(z) - vae.decode(z)).abs().max() < 0.02


def test_nan_from_the_attention_counts_as_zero() -> None:
    def nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.full_like(q.transpose(1, 2).flatten(2), torch.nan)

    def zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q.transpose(1, 2).flatten(2))

    assert torch.equal(load(attend=nan).decode(latent(2)), load(attend=zero).decode(latent(2)))


def test_the_attention_gets_64_wide_heads_and_every_token() -> None:
    shapes: list[torch.Size] = []

    def watch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.extend((q.shape, k.shape, v.shape))
        return SDPA(q, k, v)

    load(attend=watch).decode(latent(7, 3, 4))
    assert set(shapes) == {torch.Size((1, 2, 7 * 3 * 4 + 5, 64))}


def test_the_rotary_table_rotates() -> None:
    table = rotary_table((7, 3, 4), rotary_frequencies())
    assert table.shape == (1, 89, 1, 24, 2, 2)
    determinant = torch.linalg.det(table.double())
    assert torch.allclose(determinant, torch.ones_like(determinant), atol=1e-6)
    unturned = torch.eye(2).expand(5, 24, 2, 2)
    assert torch.equal(table[0, -5:, 0], unturned)


def test_an_int8_decoder_stays_packed_and_decodes() -> None:
    vae = load(format="int8_convrot")
    weights = [block.attn.to_qkv.weight for block in vae.decoder.transformer_blocks]
    assert {weight.dtype for weight in weights} == {torch.int8}
    assert vae.decode(latent(3)).shape == (9, 32, 32, 3)


# ---- refusals


def test_a_latent_of_other_channels_is_refused_in_one_sentence(vae: VideoVAE) -> None:
    with pytest.raises(ValueError, match=r"must be \[1, 24, T, h, w\], got \[1, 16, 2, 2, 2\]"):
        vae.decode_stream(torch.zeros(1, 16, 2, 2, 2))


def test_a_decode_of_nan_names_its_stage(vae: VideoVAE) -> None:
    z = latent(2)
    z[0, 3, 1] = torch.nan
    with pytest.raises(NonFinite, match=DECODE_STAGE) as error:
        vae.decode(z)
    assert error.value.stage == "video VAE decode"


def test_an_overflow_is_not_hidden_by_the_clamp() -> None:
    vae = load()
    vae.decoder.proj_out.bias.fill_(torch.inf)
    with pytest.raises(NonFinite, match=DECODE_STAGE):
        vae.decode(latent(2))


def test_an_encode_of_nan_names_its_stage(vae: VideoVAE) -> None:
    frames = pictures(1)
    frames[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFinite, match=ENCODE_STAGE):
        vae.encode(frames)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (
            torch.zeros(2, 3, 32, 32),
            r"\[F, H, W, 3\] with at least one frame, got \[2, 3, 32, 32\]",
        ),
        (torch.zeros(0, 32, 32, 3), "at least one frame"),
        (torch.zeros(1, 32, 32, 3, dtype=torch.uint8), "divide bytes by 255"),
        (torch.zeros(1, 15, 32, 3), "at least 16x16 pixels, got 32x15"),
    ],
)
def test_frames_of_another_form_are_refused(vae: VideoVAE, frames: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vae.encode(frames)


class Without:
    """A checkpoint that lacks the tensors whose names start with `prefix`."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix
        self.layers, self.quantised = checkpoint.layers, checkpoint.quantised
        self.metadata = checkpoint.metadata
        self.shape, self.dtype = checkpoint.shape, checkpoint.dtype
        self.tensor, self.packed = checkpoint.tensor, checkpoint.packed

    def names(self) -> tuple[str, ...]:
        return tuple(n for n in self._checkpoint.names() if not n.startswith(self._prefix))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("encoder.down.5", "6 encoder levels, this file has 5"),
        ("decoder.x_embedder", "lacks decoder.x_embedder.weight"),
        ("decoder.transformer_blocks.1.norm2", "missing: decoder.transformer_blocks.1.norm2"),
    ],
)
def test_a_file_that_lacks_tensors_is_refused_by_name(prefix: str, message: str) -> None:
    checkpoint = Without(random_checkpoint("video_vae", size="tiny", format="fp16"), prefix)
    with pytest.raises(CheckpointError, match=message):
        load_video_vae(checkpoint, device=CPU, dtype=torch.float32, attend=SDPA)
