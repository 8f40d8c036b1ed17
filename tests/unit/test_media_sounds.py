"""Reference sounds: levels, channels, formats and lengths survive; broken files are refused."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from runtime.media.sounds import find_sound, load_sound
from tests.unit.media_clips import (
    grey,
    level,
    peak_hertz,
    tone,
    write_clip,
    write_float_wav,
    write_wav,
)


def test_mono_stays_mono_at_full_level(tmp_path: Path) -> None:
    samples = (tone(440, 0.5, 24_000, level=1.0) * 32767).astype(np.int16)[None]
    sound = load_sound(write_wav(tmp_path / "a.wav", samples, 24_000))
    assert sound.wave.dtype == np.float32 and sound.wave.shape == (1, 1, 12_000)
    assert sound.rate == 24_000
    assert np.array_equal(sound.wave[0], samples / np.float32(32768))  # -3 dB would be 0.7 of it
    assert sound.notes == ("mono, duplicated to stereo at full level",)


def test_left_stays_left(tmp_path: Path) -> None:
    left = (tone(440, 0.25, 44_100) * 32767).astype(np.int16)
    path = write_wav(tmp_path / "a.wav", np.stack([left, np.zeros_like(left)]), 44_100)
    sound = load_sound(path)
    assert sound.wave.shape == (1, 2, len(left)) and sound.rate == 44_100
    assert np.array_equal(sound.wave[0, 0], left / np.float32(32768))
    assert not sound.wave[0, 1].any()
    assert sound.notes == ()


@pytest.mark.parametrize(
    ("dtype", "zero", "scale"), [(np.uint8, 128, 128), (np.int16, 0, 2**15), (np.int32, 0, 2**31)]
)
def test_integer_formats_are_scaled_to_one(
    tmp_path: Path, dtype: type, zero: int, scale: int
) -> None:
    samples = np.round(tone(100, 0.1, 8000, level=0.9)[None] * (scale - 1) + zero).astype(dtype)
    sound = load_sound(write_wav(tmp_path / "a.wav", samples, 8000))
    want = (samples.astype(np.float64) - zero) / scale
    assert np.abs(sound.wave[0] - want).max() <= 1e-7


def test_float_samples_above_one_are_kept(tmp_path: Path) -> None:
    samples = np.stack([tone(100, 0.1, 8000, level=1.7), tone(200, 0.1, 8000)])
    sound = load_sound(write_float_wav(tmp_path / "a.wav", samples, 8000, "stereo"))
    assert np.array_equal(sound.wave[0], samples)


def test_surround_is_mixed_down_by_the_documented_gains(tmp_path: Path) -> None:
    channels = np.stack([tone(100 * (k + 1), 0.1, 8000, level=0.3) for k in range(6)])
    path = write_float_wav(tmp_path / "a.wav", channels, 8000, "5.1")
    sound = load_sound(path)
    half = 0.5**0.5
    left = (channels[0] + half * channels[2] + half * channels[4]) / (1 + 2 * half)
    right = (channels[1] + half * channels[2] + half * channels[5]) / (1 + 2 * half)
    assert np.abs(sound.wave[0] - np.stack([left, right])).max() <= 1e-6
    assert sound.notes == ("6 sound channels (5.1) mixed down to stereo",)


def test_surround_cut_to_two_channels_as_comfyui_does(tmp_path: Path) -> None:
    channels = np.stack([tone(100 * (k + 1), 0.1, 8000, level=0.3) for k in range(6)])
    path = write_float_wav(tmp_path / "a.wav", channels, 8000, "5.1")
    sound = load_sound(path, downmix="first_two")
    assert np.array_equal(sound.wave[0], channels[:2])
    assert sound.notes == ("first two of 6 sound channels (5.1) used",)


def test_more_channels_than_a_layout_names_give_the_first_two(tmp_path: Path) -> None:
    samples = np.arange(13 * 40, dtype=np.int16).reshape(13, 40)
    sound = load_sound(write_wav(tmp_path / "a.wav", samples, 8000))
    assert np.array_equal(sound.wave[0], samples[:2] / np.float32(32768))
    assert sound.notes == ("first two of 13 sound channels (13 channels) used",)


def test_absurd_channel_count_is_refused(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", np.zeros((40, 40), np.int16), 8000)
    with pytest.raises(ValueError, match="has 40 channels, at most 32 are read"):
        load_sound(path)


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [("a.mp3", "libmp3lame", 44_100), ("a.m4a", "aac", 48_000), ("a.flac", "flac", 96_000)],
)
def test_compressed_sound_keeps_pitch_and_length(
    tmp_path: Path, name: str, codec: str, rate: int
) -> None:
    samples = np.stack([tone(1000, 1, rate), tone(1500, 1, rate)])
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        resampler = av.AudioResampler(
            format=stream.codec_context.format, layout="stereo", rate=rate, frame_size=1152
        )
        frame.sample_rate = rate
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    sound = load_sound(tmp_path / name)
    assert sound.rate == rate
    assert abs(sound.wave.shape[2] - rate) <= 2400
    middle = sound.wave[0, :, rate // 4 : rate // 4 + rate // 2]
    assert peak_hertz(middle[0], rate) == pytest.approx(1000, abs=2)
    assert peak_hertz(middle[1], rate) == pytest.approx(1500, abs=2)
    assert level(middle[0]) == pytest.approx(0.5**1.5, rel=0.06)  # -3 dB would be 29 % less


def test_soundtrack_of_a_video_is_read(tmp_path: Path) -> None:
    stereo = np.stack([tone(500, 0.5, 32_000), tone(700, 0.5, 32_000)])
    path = write_clip(tmp_path / "a.mp4", [grey(50)] * 12, sound=stereo)
    sound = load_sound(path)
    assert sound.rate == 32_000 and sound.wave.shape[:2] == (1, 2)
    assert peak_hertz(sound.wave[0, 1], 32_000) == pytest.approx(700, abs=5)


def test_silent_video_has_no_sound(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", [grey(50)] * 3)
    assert find_sound(path) is None
    with pytest.raises(ValueError, match="has no sound; give a sound file or a video with sound"):
        load_sound(path)


def test_sound_without_samples_is_refused(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", np.zeros((1, 0), np.int16), 8000)
    with pytest.raises(ValueError, match=r"no sound can be decoded from|is empty"):
        load_sound(path)


def test_text_named_wav_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("not a sound\n" * 100)
    with pytest.raises(ValueError, match="is not a readable picture, video or sound"):
        load_sound(tmp_path / "a.wav")


def test_too_long_sound_is_refused_from_the_header(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", np.zeros((1, 8000 * 3), np.int16), 8000)
    with pytest.raises(ValueError, match=r"lasts 3\.0 s, at most 2 s are read; cut it first"):
        load_sound(path, max_seconds=2)


def test_too_long_sound_is_refused_while_decoding_when_the_header_lies(tmp_path: Path) -> None:
    path = tmp_path / "a.aac"  # raw ADTS: FFmpeg guesses the duration from the bit rate
    with av.open(str(path), "w", format="adts") as container:
        stream = container.add_stream("aac", rate=32_000, layout="mono")
        quiet = av.AudioFrame.from_ndarray(tone(90, 4, 32_000)[None], format="fltp", layout="mono")
        quiet.sample_rate = 32_000
        container.mux(stream.encode(quiet))
        container.mux(stream.encode(None))
    with av.open(str(path)) as container:
        guess = container.duration / 1e6
    with pytest.raises(ValueError, match=r"lasts [34]\.\d s, at most"):
        load_sound(path, max_seconds=min(3.5, max(guess, 3.0)))


def test_samples_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    samples = np.full((1, 400), np.nan, np.float32)
    path = write_float_wav(tmp_path / "a.wav", samples, 8000, "mono")
    with pytest.raises(ValueError, match="has samples that are not numbers"):
        load_sound(path)
