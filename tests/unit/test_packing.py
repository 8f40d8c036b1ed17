"""The packed sequence against the contract's examples (A4, A5) and a row-by-row definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.h3.packing import (
    AUDIO_KINDS,
    VIDEO_KINDS,
    BlockShape,
    KeyframeShape,
    PackedLayout,
    TargetShape,
    pack,
)

TARGET = TargetShape(latent_t=37, latent_h=34, latent_w=60, audio_t=207)
SMALL = TargetShape(latent_t=7, latent_h=4, latent_w=6, audio_t=37)


def example() -> PackedLayout:
    """Contract A4."""
    return pack(
        text_len=256,
        target=TARGET,
        references=(
            BlockShape(kind="image", latent_h=34, latent_w=60),
            BlockShape(kind="video_audio", latent_t=37, latent_h=48, latent_w=84, audio_t=207),
            BlockShape(kind="audio", audio_t=120),
        ),
    )


def spans(layout: PackedLayout) -> list[tuple[str, int, int]]:
    return [(s.kind, s.start, s.stop) for s in layout.segments]


def first_row(layout: PackedLayout, kind: str) -> tuple[float, ...]:
    start = next(s.start for s in layout.segments if s.kind == kind)
    return tuple(layout.positions_S3[start].tolist())


def test_the_example_of_the_contract_has_its_segments() -> None:
    assert spans(example()) == [
        ("text", 0, 256),
        ("ref_img", 256, 766),
        ("ref_audio", 766, 1180),
        ("ref_img", 1180, 38476),
        ("ref_audio", 38476, 38716),
        ("audio", 38716, 39130),
        ("video", 39130, 58000),
    ]
    assert example().num_rows == 58_000


@pytest.mark.parametrize(
    ("row", "position"),
    [
        (255, (255, 0, 0)),
        (256, (256, 3.955637556654704, -5.254757252962289)),
        (765, (256, 26.627378626481143, 35.83777343609813)),
        (766, (257, 0, -5.166010488516722)),
        (973, (257, 0, 36.158105227158785)),
        (1180, (257, 3.9051368637047297, -5.166010488516722)),
        (38716, (584, 0, -5.254757252962289)),
        (38716 + 207, (584, 0, 35.83777343609813)),
        (39130, (584, 3.955637556654704, -5.254757252962289)),
        (57999, (783.9999999999999, 26.627378626481143, 35.83777343609813)),
    ],
)
def test_positions_of_the_example_are_exact_in_float64(
    row: int, position: tuple[float, float, float]
) -> None:
    assert tuple(example().positions_S3[row].tolist()) == position


@pytest.mark.parametrize(
    ("row", "axis", "value"),
    [
        (257, 2, -3.8377734360981366),
        (286, 1, 5.372621373518856),
        (972, 0, 463),
        (2188, 0, 258.6666666666667),
        (39129, 0, 790),
        (39130 + 510, 0, 585.6666666666666),
        (39130 + 2 * 510, 0, 592.3333333333334),
        (39130 + 5 * 510, 0, 612.3333333333334),
    ],
)
def test_single_coordinates_of_the_example_are_exact(row: int, axis: int, value: float) -> None:
    assert example().positions_S3[row, axis] == value


def test_plain_text_to_video_at_the_reference_size_has_19384_rows() -> None:
    layout = pack(text_len=100, target=TARGET)
    assert spans(layout) == [("text", 0, 100), ("audio", 100, 514), ("video", 514, 19384)]


@pytest.mark.parametrize(
    ("width", "height", "rows", "ends"),
    [
        (
            960,
            544,
            510,
            (
                3.955637556654704,
                26.627378626481143,
                -5.254757252962289,
                35.83777343609813,
            ),
        ),
        (
            1344,
            768,
            1008,
            (
                3.9051368637047297,
                27.08695787493733,
                -5.166010488516722,
                36.158105227158785,
            ),
        ),
        (
            864,
            480,
            405,
            (
                4.074304120001122,
                26.335603095999026,
                -5.466252583997981,
                35.876159799998135,
            ),
        ),
    ],
)
def test_grid_extremes_are_those_of_the_contract(
    width: int, height: int, rows: int, ends: tuple[float, ...]
) -> None:
    target = TargetShape(latent_t=1, latent_h=height // 16, latent_w=width // 16, audio_t=1)
    frame = pack(text_len=0, target=target).positions_S3[2:]
    assert len(frame) == rows
    found = (frame[0, 1], frame[-1, 1], frame[0, 2], frame[-1, 2])
    assert found == ends


def test_keyframes_are_stored_before_references_but_timed_after_them() -> None:
    layout = pack(
        text_len=10,
        target=SMALL,
        references=(BlockShape(kind="image", latent_h=4, latent_w=6),),
        keyframes=(
            KeyframeShape(frame_index=0, latent_t=1),
            KeyframeShape(frame_index=5, audio_t=3),
        ),
    )
    kinds = [s.kind for s in layout.segments]
    assert kinds == ["text", "cond", "cond_audio", "ref_img", "audio", "video"]
    assert first_row(layout, "ref_img")[0] == 10
    assert first_row(layout, "cond") == first_row(layout, "video")
    assert first_row(layout, "cond")[0] == 11
    assert first_row(layout, "cond_audio")[0] == 11 + 5 / 3 * 5


def test_one_keyframe_may_hold_pictures_and_sound() -> None:
    keyframe = KeyframeShape(frame_index=3, latent_t=2, audio_t=4)
    layout = pack(text_len=1, target=SMALL, keyframes=(keyframe,))
    assert [(s.kind, s.stop - s.start) for s in layout.segments[1:3]] == [
        ("cond", 12),
        ("cond_audio", 8),
    ]


def test_a_soundtrack_is_pinned_to_its_own_picture_and_a_lone_sound_to_the_target() -> None:
    def pins(block: BlockShape) -> tuple[float, float]:
        layout = pack(text_len=1, target=SMALL, references=(block,))
        segment = next(s for s in layout.segments if s.kind == "ref_audio")
        rows = layout.positions_S3[segment.start : segment.stop]
        assert (rows[:, 1] == 0).all()
        return rows[0, 2], rows[-1, 2]

    wide = pack(text_len=0, target=TargetShape(latent_t=1, latent_h=2, latent_w=40, audio_t=1))
    target = pack(text_len=0, target=SMALL)
    own = (wide.positions_S3[2, 2], wide.positions_S3[-1, 2])
    targets = (target.positions_S3[-6, 2], target.positions_S3[-1, 2])
    assert pins(BlockShape(kind="video_audio", latent_h=2, latent_w=40, audio_t=4)) == own
    assert pins(BlockShape(kind="audio", audio_t=4)) == targets
    assert own != targets


@pytest.mark.parametrize(
    ("block", "span"),
    [
        (BlockShape(kind="image", latent_h=4, latent_w=4), 1.0),
        (BlockShape(kind="audio", audio_t=9), 9.0),
        (BlockShape(kind="video", latent_t=2, latent_h=4, latent_w=4), 5 / 3 * 1 + 5 / 3 * 4),
        (BlockShape(kind="video_audio", latent_t=2, latent_h=2, latent_w=2, audio_t=30), 30.0),
        (BlockShape(kind="video_audio", latent_t=1, latent_h=2, latent_w=2, audio_t=1), 5 / 3),
    ],
)
def test_a_reference_moves_the_target_by_its_own_length(block: BlockShape, span: float) -> None:
    layout = pack(text_len=3, target=SMALL, references=(block,))
    assert first_row(layout, "video")[0] == 3 + span


def test_a_silent_video_has_no_sound_rows() -> None:
    block = BlockShape(kind="video", latent_t=2, latent_h=4, latent_w=4)
    layout = pack(text_len=1, target=SMALL, references=(block,))
    assert "ref_audio" not in {s.kind for s in layout.segments}


@pytest.mark.parametrize(("height", "width"), [(3, 5), (4, 5), (3, 6)])
def test_odd_sides_are_laid_out_like_the_even_ones_they_are_padded_to(
    height: int, width: int
) -> None:
    odd = TargetShape(latent_t=2, latent_h=height, latent_w=width, audio_t=8)
    even = TargetShape(latent_t=2, latent_h=4, latent_w=6, audio_t=8)
    got, want = pack(text_len=2, target=odd), pack(text_len=2, target=even)
    assert spans(got) == spans(want)
    assert np.array_equal(got.positions_S3, want.positions_S3)


def random_request(seed: int) -> tuple[PackedLayout, dict[str, int]]:
    """A random layout and the rows that each kind must have."""
    rng = random.Random(seed)
    target = TargetShape(
        latent_t=rng.randint(1, 7),
        latent_h=rng.randint(1, 7),
        latent_w=rng.randint(1, 7),
        audio_t=rng.randint(1, 20),
    )

    def patches(h: int, w: int) -> int:
        return ((h + 1) // 2) * ((w + 1) // 2)

    text_len = rng.randint(1, 30)
    want = dict.fromkeys((*VIDEO_KINDS, *AUDIO_KINDS), 0)
    want |= {"text": text_len, "audio": 2 * target.audio_t}
    want["video"] = target.latent_t * patches(target.latent_h, target.latent_w)
    references = []
    for kind in rng.choices(("image", "audio", "video", "video_audio"), k=rng.randint(0, 5)):
        block = BlockShape(
            kind=kind,
            latent_t=rng.randint(2, 7) if "video" in kind else 1,
            latent_h=0 if kind == "audio" else rng.randint(1, 9),
            latent_w=0 if kind == "audio" else rng.randint(1, 9),
            audio_t=rng.randint(1, 20) if "audio" in kind else 0,
        )
        references.append(block)
        want["ref_audio"] += 2 * block.audio_t
        if kind != "audio":
            want["ref_img"] += block.latent_t * patches(block.latent_h, block.latent_w)
    keyframes = []
    for _ in range(rng.randint(0, 3)):
        keyframe = KeyframeShape(
            frame_index=rng.randint(0, 20), latent_t=rng.randint(0, 2), audio_t=rng.randint(0, 3)
        )
        keyframes.append(keyframe)
        want["cond"] += keyframe.latent_t * patches(target.latent_h, target.latent_w)
        want["cond_audio"] += 2 * keyframe.audio_t
    layout = pack(text_len=text_len, target=target, references=references, keyframes=keyframes)
    return layout, {kind: rows for kind, rows in want.items() if rows}


@pytest.mark.parametrize("seed", range(40))
def test_every_row_belongs_to_one_segment_and_every_kind_has_its_rows(seed: int) -> None:
    layout, want = random_request(seed)
    got: dict[str, int] = {}
    stop = 0
    for segment in layout.segments:
        assert segment.start == stop
        stop = segment.stop
        got[segment.kind] = got.get(segment.kind, 0) + stop - segment.start
    assert got == want
    assert stop == layout.num_rows == sum(want.values())
    assert np.isfinite(layout.positions_S3).all()
    assert [s.kind for s in layout.segments[-2:]] == ["audio", "video"]


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_a_stream_are_its_segments_in_order_and_targets_are_marked(seed: int) -> None:
    layout, _ = random_request(seed)
    kind_of = [s.kind for s in layout.segments for _ in range(s.start, s.stop)]
    for kinds in (VIDEO_KINDS, AUDIO_KINDS):
        rows = [row for row, kind in enumerate(kind_of) if kind in kinds]
        assert layout.rows_of(kinds).tolist() == rows
        targets = [kind_of[row] in ("audio", "video") for row in rows]
        assert layout.is_target(kinds).tolist() == targets
