"""The finished mp4: colours, pitch, clocks, tags, streaming, and a whole file or none."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from runtime.cancel import Cancelled
from runtime.h3.video_decode import to_bytes
from runtime.media import mp4
from runtime.media.files import DiskFullError
from runtime.media.mp4 import WAITING_CHUNKS, Mp4Options, read_run_metadata, write_mp4
from runtime.media.sounds import load_sound
from runtime.media.videos import load_video
from runtime.nonfinite import NonFinite
from tests.unit.media_clips import level, peak_hertz, tone

RATE = 32_000


def chunks(frames: int, size: int = 17, height: int = 64, width: int = 96) -> Iterator[np.ndarray]:
    """Float frames that brighten from 0.2 to 0.8, in chunks."""
    values = np.linspace(0.2, 0.8, frames, dtype=np.float32)
    for start in range(0, frames, size):
        part = values[start : start + size]
        yield np.broadcast_to(part[:, None, None, None], (len(part), height, width, 3)).copy()


def sound_for(frames: int, hertz: float = 1000) -> np.ndarray:
    """A stereo tone of the length that the audio VAE gives for so many frames."""
    seconds = round(frames / 24 * 40) / 40
    return np.stack([tone(hertz, seconds, RATE), tone(hertz * 1.5, seconds, RATE)])


@pytest.mark.parametrize("audio_rate", [32_000, 48_000])
@pytest.mark.parametrize("frames", [5, 22, 39, 124])
def test_pictures_and_sound_end_within_one_frame(
    tmp_path: Path, frames: int, audio_rate: int
) -> None:
    path = tmp_path / "a.mp4"
    options = Mp4Options(audio_rate=audio_rate)
    written = write_mp4(path, chunks(frames), sound_for(frames), {}, options)
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert video.frames == frames and video.average_rate == 24
        assert audio.rate == audio_rate and audio.channels == 2
        ends = [float(s.duration * s.time_base) for s in (video, audio)]
    assert ends[0] == pytest.approx(frames / 24, abs=1e-3)
    assert abs(ends[0] - ends[1]) < 1 / 24
    assert len(load_video(path, max_frames=1000).frames) == frames
    decoded = load_sound(path)
    assert abs(decoded.wave.shape[2] / audio_rate - frames / 24) < 1 / 24
    assert (written.frames, written.bytes) == (frames, path.stat().st_size)
    assert written.sound_seconds == pytest.approx(frames / 24, abs=1 / 24)


@pytest.mark.parametrize("audio_rate", [32_000, 48_000])
def test_a_tone_keeps_pitch_level_and_side(tmp_path: Path, audio_rate: int) -> None:
    write_mp4(tmp_path / "a.mp4", chunks(56), sound_for(56), {}, Mp4Options(audio_rate=audio_rate))
    sound = load_sound(tmp_path / "a.mp4")
    assert sound.rate == audio_rate
    middle = sound.wave[0, :, audio_rate // 2 : audio_rate // 2 + audio_rate]
    assert peak_hertz(middle[0], audio_rate) == pytest.approx(1000, abs=1)
    assert peak_hertz(middle[1], audio_rate) == pytest.approx(1500, abs=1)
    assert level(middle[0]) == pytest.approx(0.5**1.5, rel=0.02)


def test_sound_starts_with_the_pictures(tmp_path: Path) -> None:
    wave = np.zeros((2, 2 * RATE), np.float32)
    wave[:, RATE // 2 : RATE // 2 + 400] = tone(2000, 400 / RATE, RATE, level=0.9)
    write_mp4(tmp_path / "a.mp4", chunks(48), wave, {}, Mp4Options(audio_rate=48_000))
    got = load_sound(tmp_path / "a.mp4").wave[0, 0]
    onset = int(np.argmax(np.abs(got) > 0.3)) / 48_000
    assert onset == pytest.approx(0.5, abs=2e-3)


PATCHES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.8, 0.55, 0.12), (0.1, 0.35, 0.6)]


@pytest.mark.parametrize("colour", [*PATCHES, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.5, 0.5)])
def test_colours_survive_within_3_of_255(tmp_path: Path, colour: tuple[float, ...]) -> None:
    frames = np.broadcast_to(np.array(colour, np.float32), (5, 64, 64, 3)).copy()
    write_mp4(tmp_path / "a.mp4", [frames], None, {}, Mp4Options())
    video = load_video(tmp_path / "a.mp4", max_frames=5)
    assert np.abs(video.frames.astype(float) - 255 * np.array(colour)).max() <= 3
    assert video.notes == ()


def test_stream_is_h264_yuv420p_tagged_bt709_limited(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", chunks(5), sound_for(5), {}, Mp4Options())
    with av.open(str(tmp_path / "a.mp4")) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        context = video.codec_context
        assert (context.name, context.pix_fmt, audio.codec_context.name) == (
            "h264",
            "yuv420p",
            "aac",
        )
        tags = context.colorspace, context.color_primaries, context.color_trc, context.color_range
        assert tags == (1, 1, 1, 1)
        frame = next(container.decode(video))
        assert (frame.colorspace, frame.color_primaries, frame.color_trc) == (1, 1, 1)


def test_index_comes_before_the_data(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", chunks(22), sound_for(22), {"a": 1}, Mp4Options())
    data = (tmp_path / "a.mp4").read_bytes()
    boxes, offset = [], 0
    while offset < len(data):
        boxes.append(data[offset + 4 : offset + 8])
        offset += int.from_bytes(data[offset : offset + 4], "big")
    assert boxes.index(b"moov") < boxes.index(b"mdat")


def test_sound_that_comes_last_is_interleaved(tmp_path: Path) -> None:
    frames = 24 * 15  # longer than the 10 s after which FFmpeg would stop waiting for sound
    write_mp4(tmp_path / "a.mp4", chunks(frames), lambda: sound_for(frames), {}, Mp4Options())
    with av.open(str(tmp_path / "a.mp4")) as container:
        packets = [
            (p.pos, float(p.dts * p.time_base), p.stream.type) for p in container.demux() if p.size
        ]
    packets.sort()
    latest = {"video": 0.0, "audio": 0.0}
    for _, seconds, kind in packets:
        latest[kind] = seconds
        assert abs(latest["video"] - latest["audio"]) < 1.0


def test_the_sound_is_asked_for_after_the_first_chunk(tmp_path: Path) -> None:
    asked: list[str] = []

    def pictures() -> Iterator[np.ndarray]:
        for chunk in chunks(22, size=11):
            asked.append("frames")
            yield chunk

    def sound() -> np.ndarray:
        asked.append("sound")
        return sound_for(22)

    write_mp4(tmp_path / "a.mp4", pictures(), sound, {}, Mp4Options())
    assert asked == ["frames", "sound", "frames"]


def test_run_metadata_of_20_kb_unicode_comes_back(tmp_path: Path) -> None:
    record = {
        "prompt": '雨の夜、<Picture 1> «été» 🎬 "quoted"\n' * 500,
        "seed": 2**63,
        "n": [1.5, None],
    }
    assert len(str(record).encode()) > 20_000
    write_mp4(tmp_path / "a.mp4", chunks(5), None, record, Mp4Options())
    assert read_run_metadata(tmp_path / "a.mp4") == record
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.metadata["comment"] == container.metadata["h3_run"]


def test_foreign_mp4_has_no_run_record(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        container.metadata["comment"] = "holiday"
        stream = container.add_stream("libx264", rate=24)
        stream.width = stream.height = 32
        container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="carries no run record"):
        read_run_metadata(tmp_path / "a.mp4")


def test_torch_tensors_are_written_like_arrays(tmp_path: Path) -> None:
    tensors = (torch.from_numpy(chunk) for chunk in chunks(22))
    wave = torch.from_numpy(sound_for(22))
    write_mp4(tmp_path / "a.mp4", tensors, lambda: wave, {}, Mp4Options())
    write_mp4(tmp_path / "b.mp4", chunks(22), sound_for(22), {}, Mp4Options())
    # libx264 does not always write the same bytes for the same frames; they decode to the same
    got, want = (load_video(tmp_path / name, max_frames=22).frames for name in ("a.mp4", "b.mp4"))
    assert np.array_equal(got, want)
    heard = [load_sound(tmp_path / name).wave for name in ("a.mp4", "b.mp4")]
    assert np.array_equal(*heard)


def test_chunks_wait_for_the_encoder_in_a_queue_that_ends(tmp_path: Path) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0
    noise = np.random.default_rng(0).random((5, 256, 256, 3), np.float32)

    def watched() -> Iterator[np.ndarray]:
        nonlocal most
        for _ in range(10):
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
            chunk = noise.copy()
            alive.append(weakref.ref(chunk))
            yield chunk
            del chunk

    write_mp4(tmp_path / "a.mp4", watched(), None, {}, Mp4Options())
    assert len(alive) == 10
    assert 1 < most <= 1 + WAITING_CHUNKS  # when the next one is asked for


def test_the_next_chunk_is_made_while_one_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_asked = threading.Event()
    convert = mp4._to_yuv420

    def waiting(frame: np.ndarray) -> av.VideoFrame:
        assert second_asked.wait(timeout=10)
        return convert(frame)

    def source() -> Iterator[np.ndarray]:
        yield from chunks(5)
        second_asked.set()
        yield from chunks(5)

    monkeypatch.setattr(mp4, "_to_yuv420", waiting)
    written = write_mp4(tmp_path / "a.mp4", source(), None, {}, Mp4Options())
    assert written.frames == 10
    assert written.exposed_seconds > 0 and written.encoding_seconds > 0


def test_bytes_give_the_file_of_the_floats_they_were_rounded_from(tmp_path: Path) -> None:
    floats = np.random.default_rng(0).random((22, 64, 96, 3), np.float32)
    rounded = to_bytes(torch.from_numpy(floats.copy()))
    write_mp4(tmp_path / "a.mp4", [floats], sound_for(22), {}, Mp4Options())
    write_mp4(tmp_path / "b.mp4", [rounded[:17], rounded[17:]], sound_for(22), {}, Mp4Options())
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_loud_sound_is_clamped_with_a_note(tmp_path: Path) -> None:
    wave = sound_for(22) * np.float32(2.6)
    written = write_mp4(tmp_path / "a.mp4", chunks(22), wave, {}, Mp4Options())
    assert written.notes == ("sound peaks at 1.30, clamped to 1.0",)
    assert wave.max() > 1.2  # the caller's array is left alone


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_failing_frames_leave_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[np.ndarray]:
        yield from chunks(17)
        raise RuntimeError("VAE ran out of memory")

    with pytest.raises(RuntimeError, match="VAE ran out of memory"):
        write_mp4(tmp_path / "a.mp4", failing(), sound_for(22), {}, Mp4Options())
    assert files_in(tmp_path) == []


def test_failure_keeps_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"old")
    with pytest.raises(ValueError, match="no frames were given"):
        write_mp4(tmp_path / "a.mp4", [], None, {}, Mp4Options())
    assert files_in(tmp_path) == ["a.mp4"] and (tmp_path / "a.mp4").read_bytes() == b"old"


def test_cancelling_leaves_no_file(tmp_path: Path) -> None:
    calls = 0

    def cancel() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        write_mp4(tmp_path / "a.mp4", chunks(22, size=5), None, {}, Mp4Options(), cancel)
    assert calls == 3 and files_in(tmp_path) == []


def test_a_decoder_that_fails_leaves_no_file_and_no_thread(tmp_path: Path) -> None:
    def failing() -> Iterator[np.ndarray]:
        yield from chunks(17)
        raise NonFinite("video VAE decode", "raw pixels")

    with pytest.raises(NonFinite):
        write_mp4(tmp_path / "a.mp4", failing(), None, {}, Mp4Options())
    assert files_in(tmp_path) == []
    assert not any(thread.name == "mp4" for thread in threading.enumerate())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_frames_that_are_not_finite_are_refused_by_stage(tmp_path: Path, bad: float) -> None:
    frames = next(chunks(5))
    frames[3, 7, 9, 1] = bad
    with pytest.raises(ValueError, match="video VAE decode: frame 3 holds 1 of 18432 values"):
        write_mp4(tmp_path / "a.mp4", [frames], None, {}, Mp4Options())
    assert files_in(tmp_path) == []


def test_wave_that_is_not_finite_is_refused_by_stage(tmp_path: Path) -> None:
    wave = sound_for(22)
    wave[0, 5:8] = np.nan
    with pytest.raises(ValueError, match="audio VAE decode: the wave holds 3 of"):
        write_mp4(tmp_path / "a.mp4", chunks(22), wave, {}, Mp4Options())
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("height", "width"), [(63, 64), (64, 65)])
def test_odd_sizes_are_refused(tmp_path: Path, height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"needs even sizes .*, got {width}x{height}"):
        write_mp4(tmp_path / "a.mp4", chunks(5, height=height, width=width), None, {}, Mp4Options())
    assert files_in(tmp_path) == []


def test_frames_of_another_size_are_refused(tmp_path: Path) -> None:
    both = [next(chunks(5)), next(chunks(5, height=32))]
    with pytest.raises(ValueError, match="frame 5 is 96x32, the frames before are 96x64"):
        write_mp4(tmp_path / "a.mp4", both, None, {}, Mp4Options())


@pytest.mark.parametrize("frames", [np.zeros((5, 64, 64, 3)), np.zeros((64, 64, 3), np.float32)])
def test_frames_of_another_kind_are_refused(tmp_path: Path, frames: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"frames must be uint8 or float32 \[N,H,W,3\], got"):
        write_mp4(tmp_path / "a.mp4", [frames], None, {}, Mp4Options())


def test_sound_that_ends_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sound lasts 1\.625 s and the pictures 0\.917 s"):
        write_mp4(tmp_path / "a.mp4", chunks(22), sound_for(39), {}, Mp4Options())
    assert files_in(tmp_path) == []


def test_other_audio_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="audio_rate must be 32000 or 48000 Hz, got 44100"):
        Mp4Options(audio_rate=44_100)


def test_metadata_that_is_not_json_is_refused_before_encoding(tmp_path: Path) -> None:
    def never() -> Iterator[np.ndarray]:
        raise AssertionError("frames were asked for")
        yield

    for bad in ({"loss": float("nan")}, {"prompt": "\ud800"}):
        with pytest.raises(ValueError, match=r"JSON|surrogates"):
            write_mp4(tmp_path / "a.mp4", never(), None, bad, Mp4Options())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB where the test may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small disk here; the next test replaces the encoder's write")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def noise() -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    for _ in range(4):
        yield random.random((6, 128, 128, 3), dtype=np.float32)


def test_full_disk_is_told_in_a_sentence_and_leaves_nothing(small_disk: Path) -> None:
    with pytest.raises(
        DiskFullError, match=r"no space left to write .*a\.mp4: its disk has 0\.1 MiB"
    ):
        write_mp4(small_disk / "a.mp4", noise(), None, {}, Mp4Options())
    assert files_in(small_disk) == []


def test_no_space_error_of_the_encoder_becomes_a_sentence(tmp_path: Path) -> None:
    def full() -> Iterator[np.ndarray]:
        yield from chunks(5)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError, match=r"no space left to write .*MiB free") as caught:
        write_mp4(tmp_path / "a.mp4", full(), None, {}, Mp4Options())
    assert caught.value.errno == errno.ENOSPC and files_in(tmp_path) == []
