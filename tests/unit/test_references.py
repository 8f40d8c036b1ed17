"""Reference preparation: sizes, frames, resizing and cropping as ComfyUI's nodes do them."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from runtime.h3 import sizes
from runtime.h3.references import (
    Guide,
    ReferenceMedia,
    crop_to_aspect,
    encoding_notes,
    guide_place,
    prepare_first_frame,
    prepare_guide,
    prepare_image,
    prepare_last_frame,
    prepare_text_frames,
    prepare_video,
    resize_lanczos,
    to_canvas,
    video_size,
)
from runtime.messages import frame_count


def pictures(frames: int, height: int, width: int, seed: int = 0) -> Tensor:
    """8-bit noise as float32 [F,H,W,3]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, height, width, 3), generator=generator) / 255


def image(height: int, width: int) -> ReferenceMedia:
    pixels = pictures(1, height, width)
    return ReferenceMedia(kind="image", pixels=pixels, wave=None, sample_rate=0, content_hash="i")


def video(frames: int, height: int, width: int) -> ReferenceMedia:
    pixels = pictures(frames, height, width)
    return ReferenceMedia(kind="video", pixels=pixels, wave=None, sample_rate=0, content_hash="v")


# ---- integer rules


@pytest.mark.parametrize(
    ("length", "frames", "latents", "audio"),
    [
        (1, 5, 2, 8), (5, 5, 2, 8), (6, 22, 7, 37), (22, 22, 7, 37), (23, 39, 12, 65),
        (56, 56, 17, 93), (73, 73, 22, 122), (90, 90, 27, 150), (107, 107, 32, 178),
        (119, 124, 37, 207), (120, 124, 37, 207), (124, 124, 37, 207), (125, 141, 42, 235),
        (200, 209, 62, 348), (362, 362, 107, 603),
    ],
)  # fmt: skip
def test_lengths_give_the_frames_and_latents_of_comfyui(
    length: int, frames: int, latents: int, audio: int
) -> None:
    assert frame_count(length) == frames
    assert sizes.latent_frames(frames) == latents
    assert sizes.audio_latents_of_frames(frames) == audio


@pytest.mark.parametrize(
    ("width", "height", "canvas"),
    [
        (1280, 720, (1344, 768)), (1920, 1080, (1344, 768)), (1080, 1920, (768, 1344)),
        (640, 480, (1024, 768)), (3000, 500, (2496, 416)), (512, 512, (768, 768)),
        (854, 480, (1344, 768)),
    ],
)  # fmt: skip
def test_aspects_give_the_768p_canvas_of_comfyui(
    width: int, height: int, canvas: tuple[int, int]
) -> None:
    assert sizes.adapted_canvas(width, height) == canvas


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (1920, 1080, (1344, 768)),  # more pixels than the canvas: the canvas
        (1280, 720, (1280, 704)),  # fewer: its own size; 22.5 rounds to even
        (64, 32, (64, 32)),
        (20, 500, (32, 512)),  # 15.6 rounds up, 0.6 to at least one
        (10, 10, (32, 32)),
    ],
)
def test_a_reference_video_keeps_its_size_below_the_canvas(
    width: int, height: int, size: tuple[int, int]
) -> None:
    assert sizes.canvas_of_video(width, height) == size


@pytest.mark.parametrize(
    ("side", "mode", "size"),
    [
        ((100, 300), "match", (96, 288)),  # never enlarged, rounded to 32
        ((128, 96), "match", (128, 96)),
        ((1920, 1088), "match", (960, 544)),
        ((4000, 1000), "match", (1440, 352)),
        ((80, 48), "max", (64, 64)),  # 2.5 and 1.5 round to even
        ((100, 300), "max", (96, 288)),
        ((4096, 4096), "max", (2048, 2048)),
        ((6000, 3000), "max", (4096, 2048)),
        ((7, 7), "max", (32, 32)),
    ],
)
def test_images_are_encoded_at_the_size_of_their_mode(
    side: tuple[int, int], mode: str, size: tuple[int, int]
) -> None:
    assert sizes.size_of_image(*side, mode=mode, target=(960, 544)) == size


def test_an_unknown_image_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="one of match, max, got 'fit'"):
        sizes.size_of_image(64, 64, mode="fit", target=(64, 64))


@pytest.mark.parametrize(
    ("frames", "target", "kept"),
    [(24, 22, 22), (41, 39, 39), (22, 124, 22), (123, 124, 107), (21, 124, 5), (5, 5, 5)],
)
def test_videos_are_cut_to_the_target_and_then_to_17k_plus_5(
    frames: int, target: int, kept: int
) -> None:
    assert sizes.kept_frames(frames, target) == kept


def test_a_video_of_four_frames_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"at least 5 frames at 24 fps, got 4; use a longer video"):
        sizes.kept_frames(4, 124)


def test_the_text_encoder_sees_two_frames_a_second() -> None:
    assert sizes.text_frames(5) == (0,)
    assert sizes.text_frames(39) == (0, 12, 24, 36)
    assert len(sizes.text_frames(124)) == 11


@pytest.mark.parametrize(("index", "resolved"), [(0, 0), (17, 17), (38, 38), (-1, 38), (-39, 0)])
def test_guide_frames_count_from_either_end(index: int, resolved: int) -> None:
    assert sizes.resolved_frame(index, 39) == resolved


@pytest.mark.parametrize("index", [39, -40])
def test_a_guide_outside_the_target_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=rf"must be -39 to 38, got {index}"):
        sizes.resolved_frame(index, 39)


def test_audio_guides_end_with_the_target() -> None:
    assert sizes.guide_audio_latents(10, 39) == 48
    assert sizes.guide_audio_latents(0, 39) == 65
    assert sizes.guide_audio_latents(38, 39) == 1
    assert sizes.guide_audio_latents(35, 39) == 6


def test_the_size_rules_never_import_torch() -> None:
    tree = ast.parse(Path(sizes.__file__).read_text())
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert found == {"__future__", "math", "numpy", "runtime.messages"}


# ---- pixels


def test_resizing_truncates_to_8_bits_and_filters_horizontally_first() -> None:
    pixels = pictures(2, 40, 56)
    pixels[0, 0, 0] = 0.9999  # 254.97 truncates to 254
    bytes_ = (pixels.numpy() * np.float32(255)).astype(np.uint8)
    assert bytes_[0, 0, 0, 0] == 254
    for frame, got in zip(bytes_, resize_lanczos(pixels, (96, 32)), strict=True):
        wide = Image.fromarray(frame).resize((96, 40), Image.Resampling.LANCZOS)
        want = np.asarray(wide.resize((96, 32), Image.Resampling.LANCZOS), dtype=np.float32) / 255
        assert np.array_equal(got.numpy(), want)


def test_every_8_bit_value_survives_a_resize_to_the_same_size() -> None:
    ramp = (torch.arange(256) / 255).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3).contiguous()
    assert torch.equal(resize_lanczos(ramp, (16, 16)), ramp)


def test_values_outside_zero_to_one_are_clipped() -> None:
    pixels = torch.tensor([-0.5, 1.5]).reshape(1, 1, 2, 1).expand(-1, -1, -1, 3)
    assert resize_lanczos(pixels, (2, 1)).flatten().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("height", "width", "size", "rows", "columns"),
    [
        (90, 70, (64, 64), slice(10, 80), slice(0, 70)),
        (40, 70, (64, 32), slice(2, 38), slice(0, 70)),  # a margin of 2.5 rounds to even
        (64, 100, (64, 64), slice(0, 64), slice(18, 82)),
        (32, 64, (64, 32), slice(0, 32), slice(0, 64)),
    ],
)
def test_cropping_keeps_the_centre_with_rounded_margins(
    height: int, width: int, size: tuple[int, int], rows: slice, columns: slice
) -> None:
    pixels = pictures(1, height, width)
    assert torch.equal(crop_to_aspect(pixels, size), pixels[:, rows, columns])


def test_the_first_frame_is_stretched_and_the_last_is_cropped() -> None:
    pixels = torch.zeros(2, 64, 128, 3)
    pixels[:, :, :32], pixels[:, :, 96:] = 1, 1  # bright margins left and right
    first = prepare_first_frame(pixels, (64, 64))
    last = prepare_last_frame(pixels, (64, 64))
    assert first.shape == last.shape == (1, 64, 64, 3)
    assert first[0, 32, 4, 0] == 1
    assert last[0, 32, 4, 0] < 0.1


def test_an_image_is_its_first_frame_at_the_encoded_size() -> None:
    media = image(300, 100)
    prepared = prepare_image(media, mode="match", target=(960, 544))
    assert prepared.shape == (1, 288, 96, 3)
    assert media.pixels is not None
    assert torch.equal(prepared, resize_lanczos(media.pixels, (96, 288)))


def test_cutting_before_resizing_gives_the_frames_of_resizing_before_cutting() -> None:
    media = video(24, 40, 70)
    assert media.pixels is not None
    assert torch.equal(
        prepare_video(media, target_frames=22), resize_lanczos(media.pixels, (64, 32))[:22]
    )


def test_text_frames_are_every_twelfth_of_the_kept_frames_with_their_seconds() -> None:
    media = video(41, 32, 32)
    frames, seconds = prepare_text_frames(media, target_frames=39)
    assert torch.equal(frames, prepare_video(media, target_frames=39)[::12])
    assert seconds == (0.0, 0.5, 1.0, 1.5)


@pytest.mark.parametrize(("height", "width"), [(50, 70), (801, 1100), (471, 2196)])
def test_frames_resized_while_reading_equal_frames_resized_later(height: int, width: int) -> None:
    media = video(5, height, width)
    assert media.pixels is not None
    frames = (media.pixels * 255).round().to(torch.uint8).numpy()
    early = ReferenceMedia(
        kind="video",
        pixels=torch.from_numpy(np.stack([to_canvas(f) for f in frames])) / 255,
        wave=None,
        sample_rate=0,
        content_hash="v",
        on_canvas=True,
    )
    assert video_size(early) == video_size(media)
    assert torch.equal(prepare_video(early, target_frames=5), prepare_video(media, target_frames=5))


# ---- guides


def test_a_guide_of_seven_frames_keeps_five_and_of_four_keeps_one() -> None:
    for frames, kept in ((7, 5), (4, 1), (22, 22), (38, 22)):
        guide = Guide(frame_index=1, pixels=pictures(frames, 40, 70), content_hash="g")
        assert guide_place(guide, target_frames=39) == (1, kept)
        prepared = prepare_guide(guide, target=(64, 32), kept=kept)
        assert prepared.shape == (kept, 32, 64, 3)


def test_a_guide_that_runs_past_the_end_names_the_last_place_that_fits() -> None:
    guide = Guide(frame_index=-4, pixels=pictures(5, 32, 64), content_hash="g")
    with pytest.raises(ValueError, match=r"5 frames does not fit at frame 35 of 39; use frame 34"):
        guide_place(guide, target_frames=39)


def test_a_guide_is_pictures_or_a_sound() -> None:
    wave = torch.zeros(1, 2, 800)
    with pytest.raises(ValueError, match="make two guides"):
        Guide(
            frame_index=0, pixels=pictures(1, 8, 8), wave=wave, sample_rate=32000, content_hash="g"
        )


# ---- media


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kind": "audio"}, "pictures belong to an image or video"),
        ({"pixels": None}, "pictures belong to an image or video"),
        ({"wave": torch.zeros(1, 1, 800), "sample_rate": 32000}, "an image reference has no sound"),
        ({"pixels": torch.zeros(1, 8, 8, 3, dtype=torch.uint8)}, r"must be float32 .* torch.uint8"),
        ({"pixels": torch.zeros(8, 8, 3)}, r"got torch.float32 \[8, 8, 3\]"),
        (
            {"kind": "video", "wave": torch.zeros(2, 800), "sample_rate": 8},
            r"\[1, channels, samples",
        ),
        ({"kind": "video", "wave": torch.zeros(1, 2, 800)}, "needs its sample rate in Hz, got 0"),
        (
            {"kind": "video", "wave": torch.zeros(1, 2, 1000), "sample_rate": 48000},
            "at least 25 ms, got 1000 samples at 48000 Hz",
        ),
    ],
)  # fmt: skip
def test_media_that_fit_nowhere_are_refused(changes: dict[str, object], sentence: str) -> None:
    fields = {
        "kind": "image", "pixels": torch.zeros(1, 8, 8, 3), "wave": None, "sample_rate": 0,
        "content_hash": "x",
    }  # fmt: skip
    with pytest.raises(ValueError, match=sentence):
        ReferenceMedia(**(fields | changes))  # type: ignore[arg-type]


# ---- what the user is told


@pytest.mark.parametrize(
    ("media", "notes"),
    [
        (image(64, 96), ()),
        (image(544, 960), ("960x544 -> 96x64 pixels",)),
        (video(22, 8, 8), ()),
        (video(30, 8, 8), ("30 -> 22 frames encoded, the rest cut",)),
        (
            ReferenceMedia(
                kind="audio",
                pixels=None,
                wave=torch.zeros(1, 2, 9),
                sample_rate=9,
                content_hash="a",
            ),
            (),
        ),
    ],
)
def test_a_note_tells_what_encoding_changes(media: ReferenceMedia, notes: tuple[str, ...]) -> None:
    assert encoding_notes(media, mode="match", target=(96, 64), target_frames=22) == notes
