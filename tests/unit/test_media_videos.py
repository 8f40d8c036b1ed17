"""Reference videos: rate, rotation, colours, HDR, alpha, and files that only pretend."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from runtime.media.colour import (
    PEAK_NITS,
    WHITE_NITS,
    hlg_display_light,
    hlg_scene_light,
    pq_nits,
    tone_curve,
)
from runtime.media.images import BACKGROUND
from runtime.media.videos import load_video
from tests.unit.media_clips import (
    HEIGHT,
    QUARTER_TURNS,
    WIDTH,
    grey,
    patch_matrix,
    tone,
    which,
    write_clip,
    write_counting,
    write_hdr,
    write_wav,
)


def searchsorted_rule(times: np.ndarray, end: float, fps: int = 24) -> list[int]:
    """The resampling rule written down once more, over all timestamps at a time."""
    grid = np.arange(int(end * fps + 1e-6)) / fps
    index = np.searchsorted(times, grid + 1e-6, side="right") - 1
    return np.clip(index, 0, len(times) - 1).tolist()


def test_24_fps_passes_through_frame_by_frame_without_a_note(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 29)
    video = load_video(path, max_frames=1000)
    assert video.frames.dtype == np.uint8 and video.frames.shape == (29, HEIGHT, WIDTH, 3)
    assert which(video.frames) == list(range(29))
    assert video.notes == ()


@pytest.mark.parametrize("container", ["mp4", "mkv", "mov", "avi"])
def test_24_fps_is_kept_by_containers_that_round_timestamps(tmp_path: Path, container: str) -> None:
    path = write_counting(tmp_path / f"a.{container}", 49)
    assert which(load_video(path, max_frames=1000).frames) == list(range(49))


@pytest.mark.parametrize("fps", [12, 25, 30, 50, 60])
def test_other_rates_follow_the_timestamp_rule(tmp_path: Path, fps: int) -> None:
    path = write_counting(tmp_path / "a.mp4", 61, fps=fps)
    video = load_video(path, max_frames=1000)
    assert which(video.frames) == searchsorted_rule(np.arange(61) / fps, 61 / fps)
    count = len(video.frames)
    assert video.notes == (f"{fps} fps -> 24 fps, 61 -> {count} frames",)


def test_149_frames_of_30_fps_become_119(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", [grey(100)] * 149, fps=30)
    assert load_video(path, max_frames=1000).notes == ("30 fps -> 24 fps, 149 -> 119 frames",)


def test_four_frames_of_30_fps_are_three(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 4, fps=30)
    assert which(load_video(path, max_frames=1000).frames) == [0, 1, 2]


def test_ntsc_film_rate_keeps_every_frame(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 40, fps=Fraction(24000, 1001))
    video = load_video(path, max_frames=1000)
    assert which(video.frames) == list(range(40))
    assert video.notes == ("23.976 fps -> 24 fps, each frame kept",)


@pytest.mark.parametrize(
    "gaps", [[33, 100, 33, 33, 100, 17, 33, 200, 33, 100] * 2, [83, 43], [10, 20, 30, 40, 84]]
)
def test_variable_rate_is_resampled_by_timestamp(tmp_path: Path, gaps: list[int]) -> None:
    pts = np.concatenate([[0], np.cumsum(gaps)]).tolist()
    path = write_counting(tmp_path / "a.mp4", len(pts), pts_ms=pts, fps=30)
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
        times = np.array([float(f.pts * f.time_base) for f in frames])
        end = times[-1] + float(frames[-1].duration * frames[-1].time_base)
    video = load_video(path, max_frames=1000)
    assert np.abs(times - np.array(pts) / 1000).max() < 1e-3
    assert which(video.frames) == searchsorted_rule(times, end)
    assert video.notes[0].startswith("variable frame rate (")


def test_clip_that_starts_late_starts_with_its_first_frame(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mkv", 5, pts_ms=[500, 542, 583, 625, 667])
    video = load_video(path, max_frames=1000)
    assert which(video.frames) == [0, 1, 2, 3, 4]
    assert video.start_seconds == pytest.approx(0.5)


def test_only_what_is_needed_is_decoded_and_resized(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 79, fps=48)
    seen: list[int] = []

    def halve(frame: np.ndarray) -> np.ndarray:
        seen.append(which(frame[None])[0])
        return frame[::2, ::2]

    video = load_video(path, max_frames=10, resize=halve)
    assert video.frames.shape == (10, HEIGHT // 2, WIDTH // 2, 3)
    assert seen == list(range(0, 20, 2))
    assert video.notes == (
        "64x48 -> 32x24 pixels",
        "48 fps -> 24 fps, 19 -> 10 frames",
        "first 19 of 79 source frames used, the rest cut",
    )


def test_exactly_enough_frames_are_not_called_cut(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 22)
    assert load_video(path, max_frames=22).notes == ()


def test_pixels_are_float32_in_unit_range(tmp_path: Path) -> None:
    video = load_video(write_counting(tmp_path / "a.mp4", 5), max_frames=5)
    assert video.pixels().dtype == np.float32
    assert np.array_equal(video.pixels(), video.frames.astype(np.float32) / np.float32(255))


def marked() -> np.ndarray:
    """Top left red, top right green, bottom left blue, bottom right white."""
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[:24, :32], image[:24, 32:] = (255, 0, 0), (0, 255, 0)
    image[24:, :32], image[24:, 32:] = (0, 0, 255), (255, 255, 255)
    return image


def quadrants(image: np.ndarray) -> np.ndarray:
    """The pixel in the middle of each quadrant."""
    height, width = image.shape[:2]
    return image[height // 4 :: height // 2, width // 4 :: width // 2].astype(int)


@pytest.mark.parametrize("degrees", QUARTER_TURNS)
def test_display_matrix_rotates(tmp_path: Path, degrees: int) -> None:
    path = write_clip(tmp_path / "a.mp4", [marked()] * 3)
    patch_matrix(path, QUARTER_TURNS[degrees])
    video = load_video(path, max_frames=3)
    want = np.rot90(marked(), -degrees // 90)
    assert video.frames[0].shape == want.shape
    assert np.abs(quadrants(video.frames[0]) - quadrants(want)).max() <= 3
    assert video.notes == (f"rotated {degrees}° clockwise by its display matrix",)


def test_mirrored_display_matrix_flips(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", [marked()] * 3)
    patch_matrix(path, (-1, 0, 0, 0, 1, 0, 64, 0, 1))
    video = load_video(path, max_frames=3)
    assert np.abs(quadrants(video.frames[0]) - quadrants(marked()[:, ::-1])).max() <= 3
    assert video.notes == ("mirrored by its display matrix",)


COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 150, 30), (20, 90, 160), (128, 128, 128)]


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", [1, 5])
@pytest.mark.parametrize("colour", COLOURS)
def test_matrix_and_range_tags_are_honoured(
    tmp_path: Path, colour: tuple[int, int, int], matrix: int, full_range: bool
) -> None:
    image = np.full((HEIGHT, WIDTH, 3), colour, np.uint8)
    path = write_clip(
        tmp_path / "a.mp4", [image] * 2, matrix=matrix, full_range=full_range, options={"crf": "4"}
    )
    video = load_video(path, max_frames=2)
    assert np.abs(video.frames[:, 20, 20].astype(int) - colour).max() <= 3
    assert video.notes == ()


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p", "yuv420p10le"])
def test_many_colours_are_converted_within_2_of_255(tmp_path: Path, pix_fmt: str) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = colours.repeat(16, axis=0).repeat(16, axis=1)
    path = write_clip(tmp_path / "a.mp4", [image], pix_fmt=pix_fmt, options={"crf": "0"})
    got = load_video(path, max_frames=1).frames[0, 8::16, 8::16]
    assert np.abs(got.astype(int) - colours).max() <= 2


def test_motion_jpeg_is_full_range(tmp_path: Path) -> None:
    image = np.full((HEIGHT, WIDTH, 3), (250, 5, 90), np.uint8)
    path = write_clip(
        tmp_path / "a.avi",
        [image] * 2,
        codec="mjpeg",
        pix_fmt="yuvj420p",
        matrix=5,
        full_range=True,
        options={"qscale": "1"},
    )
    assert np.abs(load_video(path, max_frames=2).frames[0, 20, 20] - (250.0, 5, 90)).max() <= 3


@pytest.mark.parametrize(("width", "height", "name"), [(64, 48, "ITU601"), (1280, 64, "ITU709")])
def test_untagged_matrix_is_assumed_as_players_do_and_noted(
    tmp_path: Path, width: int, height: int, name: str
) -> None:
    matrix = {"ITU601": 5, "ITU709": 1}[name]
    image = np.full((height, width, 3), (200, 30, 90), np.uint8)
    planes = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(
        format="yuv420p",
        src_colorspace=matrix,
        dst_colorspace=matrix,
        src_color_range=2,
        dst_color_range=1,
    )
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "4"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        plain = av.VideoFrame.from_ndarray(planes.to_ndarray(), format="yuv420p")
        container.mux(stream.encode(plain))
        container.mux(stream.encode(None))
    video = load_video(tmp_path / "a.mp4", max_frames=1)
    assert np.abs(video.frames[0, 20, 20].astype(int) - (200, 30, 90)).max() <= 3
    assert video.notes == (f"no colour matrix in the file, {name} assumed",)


def srgb(light: float) -> float:
    return 12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_hdr_greys_are_tone_mapped_to_the_documented_curve(
    tmp_path: Path, transfer: int, name: str
) -> None:
    codes = [0.1, 0.3, 0.5, 0.7]
    video = load_video(write_hdr(tmp_path / "a.mp4", codes, transfer), max_frames=3)
    for index, code in enumerate(codes):
        signal = np.array([code])
        if name == "PQ":
            light = float(pq_nits(signal)[0]) / WHITE_NITS
        else:
            scene = np.full((1, 1, 3), hlg_scene_light(signal)[0], np.float32)
            light = float(hlg_display_light(scene)[0, 0, 0])
        toned = float(tone_curve(np.full((1, 1, 3), light, np.float32))[0, 0, 0])
        got = video.frames[1, 24, index * 16 + 8]
        assert np.abs(got - 255 * srgb(min(toned, 1))).max() <= 3
    assert video.notes == (
        f"HDR ({name}, BT.2020) tone-mapped to SDR: 203 nits white, 1000 nits peak",
    )


def test_transfer_functions_meet_their_published_values() -> None:
    # BT.2408: 203 nits is 58 % PQ and 75 % HLG; full HLG signal is the 1000 nits of its display
    assert pq_nits(np.array([0.5807]))[0] == pytest.approx(203, rel=5e-3)
    assert pq_nits(np.array([0.0, 1.0])) == pytest.approx([0, 10_000])
    scene = hlg_scene_light(np.array([0.75, 1.0])).astype(np.float32)
    grey_light = hlg_display_light(np.repeat(scene, 3).reshape(2, 1, 3))[:, 0, 0]
    assert grey_light * WHITE_NITS == pytest.approx([203, 1000], rel=5e-3)


def test_tone_curve_is_smooth_monotone_and_ends_at_one() -> None:
    light = np.linspace(0, PEAK_NITS / WHITE_NITS, 4001, dtype=np.float32)
    toned = tone_curve(np.repeat(light, 3).reshape(-1, 1, 3))[:, 0, 0]
    slope = np.diff(toned) / np.diff(light)
    assert (slope > 0).all() and np.abs(np.diff(slope)).max() < 0.01
    assert toned[-1] == pytest.approx(1, abs=1e-5)
    assert np.array_equal(toned[light <= 0.5], light[light <= 0.5])


def test_hdr_phone_clip_rotated_with_variable_rate(tmp_path: Path) -> None:
    path = write_hdr(tmp_path / "a.mp4", [0.2, 0.4, 0.6, 0.75], 18)
    patch_matrix(path, QUARTER_TURNS[90])
    video = load_video(path, max_frames=3)
    assert video.frames.shape == (3, WIDTH, HEIGHT, 3)
    column = video.frames[0][:, 24, 0].astype(int)
    assert column[8] < column[24] < column[40] < column[56]
    assert [note.split(" ")[0] for note in video.notes] == ["rotated", "HDR"]


def test_sdr_wide_gamut_keeps_greys_and_is_noted(tmp_path: Path) -> None:
    path = write_hdr(tmp_path / "a.mp4", [0.1, 0.4, 0.7, 1.0], 14)
    video = load_video(path, max_frames=3)
    got = video.frames[0, 24, 8::16].astype(float)
    assert np.abs(got - 255 * np.array([[0.1], [0.4], [0.7], [1.0]])).max() <= 2
    assert video.notes == ("BT.2020 colours converted to BT.709",)


def rgba_image() -> np.ndarray:
    image = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    image[..., :3] = (200, 100, 0)
    image[:, :32, 3] = 255
    return image


def test_alpha_of_a_png_in_mov_is_composited(tmp_path: Path) -> None:
    path = write_clip(
        tmp_path / "a.mov", [rgba_image()] * 2, codec="png", pix_fmt="rgba", frame_format="rgba"
    )
    video = load_video(path, max_frames=2)
    assert video.frames[0, 5, 5].tolist() == [200, 100, 0]
    assert video.frames[0, 5, 60].tolist() == list(BACKGROUND)
    assert video.notes == ("alpha composited on #808080",)


def test_cut_alpha_of_a_video_shows_the_hidden_colour(tmp_path: Path) -> None:
    path = write_clip(
        tmp_path / "a.mov", [rgba_image()] * 2, codec="png", pix_fmt="rgba", frame_format="rgba"
    )
    assert load_video(path, max_frames=2, alpha="cut").frames[0, 5, 60].tolist() == [200, 100, 0]


def test_alpha_of_vp9_in_webm_is_composited(tmp_path: Path) -> None:
    alpha = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    alpha[..., :3], alpha[:, :32, 3] = 255, 255
    path = write_clip(
        tmp_path / "a.webm",
        [alpha] * 3,
        codec="libvpx-vp9",
        pix_fmt="yuva420p",
        frame_format="rgba",
        tags={"alpha_mode": "1"},
    )
    video = load_video(path, max_frames=3)
    assert "alpha composited on #808080" in video.notes
    assert np.abs(video.frames[1, 24, 8].astype(int) - 255).max() <= 3
    assert np.abs(video.frames[1, 24, 56].astype(int) - BACKGROUND).max() <= 3


def test_animated_gif_is_a_video(tmp_path: Path) -> None:
    images = [grey(value)[..., 0] for value in (0, 100, 200)]
    write_clip(tmp_path / "a.gif", images, codec="gif", pix_fmt="gray", frame_format="gray", fps=10)
    video = load_video(tmp_path / "a.gif", max_frames=100)
    assert video.frames[:, 0, 0, 0].tolist() == sorted(video.frames[:, 0, 0, 0].tolist())
    assert 7 <= len(video.frames) <= 8


def test_non_square_pixels_are_squared(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", [grey(90)] * 2, aspect=Fraction(3, 2))
    video = load_video(path, max_frames=2)
    assert video.frames.shape[1:3] == (48, 96)
    assert video.notes == ("non-square pixels squared, 64 -> 96 columns",)


def test_interlaced_video_is_noted(tmp_path: Path) -> None:
    options = {"x264-params": "interlaced=1:tff=1"}
    path = write_clip(tmp_path / "a.mp4", [grey(90, height=64)] * 3, options=options)
    assert "interlaced video used without deinterlacing" in load_video(path, max_frames=3).notes


def test_ffconcat_disguised_as_mp4_is_refused(tmp_path: Path) -> None:
    write_counting(tmp_path / "secret.mp4", 5)
    (tmp_path / "a.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    with av.open(str(tmp_path / "a.mp4")) as container:  # the attack works where nobody forbids it
        assert container.format.name == "concat"
    with pytest.raises(ValueError, match=r"a\.mp4 is not a readable picture, video or sound"):
        load_video(tmp_path / "a.mp4", max_frames=5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n"),
        ("a.sdp", "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n"),
        ("a.mp4", "this is text and no video at all\n" * 40),
    ],
)
def test_playlists_and_text_are_refused(tmp_path: Path, name: str, text: str) -> None:
    write_counting(tmp_path / "secret.mp4", 5)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="is not a readable picture, video or sound"):
        load_video(tmp_path / name, max_frames=5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.mp4", "concat:a.mp4|b.mp4", "rtsp://h/a"])
def test_urls_are_refused_before_anything_is_opened(url: str) -> None:
    with pytest.raises(ValueError, match="is an address, not a file"):
        load_video(Path(url), max_frames=5)


@pytest.mark.parametrize("movflags", ["faststart", "empty_moov"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_truncated_mp4_is_refused(tmp_path: Path, movflags: str, part: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, HEIGHT, WIDTH, 3), dtype=np.uint8)
    with av.open(str(tmp_path / "a.mp4"), "w", options={"movflags": movflags}) as container:
        stream = container.add_stream("libx264", rate=24, options={"g": "3"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for image in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ValueError, match=r"a\.mp4 is not a readable .* damaged or cut short"):
        load_video(tmp_path / "a.mp4", max_frames=100)


def test_mp4_without_its_index_is_refused(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 12)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_video(path, max_frames=100)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
def test_damaged_video_is_read_or_refused_and_never_crashes(tmp_path: Path, suffix: str) -> None:
    random = np.random.default_rng(0)
    path = write_counting(tmp_path / f"a.{suffix}", 6)
    good = np.frombuffer(path.read_bytes(), np.uint8)
    refused = 0
    for _ in range(30):
        data = good.copy()
        data[random.integers(0, len(data), 20)] = random.integers(0, 256, 20)
        path.write_bytes(data.tobytes())
        try:
            load_video(path, max_frames=5)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 3


def test_title_that_is_not_utf_8_does_not_matter(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mkv", 6, tags={"title": "xxxx"})
    data = path.read_bytes()
    assert data.count(b"xxxx") == 1
    path.write_bytes(data.replace(b"xxxx", b"\xe9t\xe9s"))
    assert which(load_video(path, max_frames=6).frames) == list(range(6))


def test_sound_file_is_no_video(tmp_path: Path) -> None:
    samples = (tone(440, 0.2, 8000) * 32767).astype(np.int16)[None]
    with pytest.raises(ValueError, match="has no moving pictures"):
        load_video(write_wav(tmp_path / "a.mp4", samples, 8000), max_frames=5)


def test_huge_frames_are_refused_from_the_header(tmp_path: Path) -> None:
    big = np.zeros((6000, 6400), np.uint8)
    path = write_clip(tmp_path / "a.mov", [big], codec="png", pix_fmt="gray", frame_format="gray")
    started = time.monotonic()
    with pytest.raises(ValueError, match="is 6400x6000, at most 8192x4320 is read"):
        load_video(path, max_frames=5)
    assert time.monotonic() - started < 5


def test_hours_of_video_are_refused_from_the_header(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 2, pts_ms=[0, 4_000_000])
    with pytest.raises(ValueError, match=r"lasts \d+\.\d s, at most 3600 s are read; cut it first"):
        load_video(path, max_frames=5)


def test_decoding_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 30)

    def slow(frame: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return frame

    with pytest.raises(ValueError, match=r"took more than 0\.1 s; make it smaller or shorter"):
        load_video(path, max_frames=30, resize=slow, timeout_seconds=0.1)


def test_dolby_vision_without_hdr_layer_is_refused(tmp_path: Path) -> None:
    path = write_hdr(tmp_path / "a.mp4", [0.5, 0.5], 2, primaries=2)
    data = path.read_bytes()
    assert data.count(b"hev1") == 1
    path.write_bytes(data.replace(b"hev1", b"dvhe"))
    with pytest.raises(ValueError, match=r"Dolby Vision .*profile 5"):
        load_video(path, max_frames=3)


def test_colour_system_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", [grey(90)] * 2)
    data = path.read_bytes()
    nclx = data.find(b"nclx") + 8
    assert data[nclx : nclx + 2] == b"\0\1"
    path.write_bytes(data[:nclx] + b"\0\x0e" + data[nclx + 2 :])
    image = np.full((HEIGHT, WIDTH, 3), 90, np.uint8)
    path = write_clip(tmp_path / "b.mp4", [image] * 2, options={"x264-params": "colormatrix=ictcp"})
    with pytest.raises(ValueError, match=r"b\.mp4 cannot be used: its colours .* code 14"):
        load_video(path, max_frames=2)
