"""Hashes, atomic writing, probing, and references as the pipeline gets them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from runtime.media.files import (
    atomic_file,
    content_hash,
    local_file,
    remove_parts,
    write_json_atomic,
)
from runtime.media.probe import probe
from runtime.media.references import LoadOptions, load_reference
from runtime.media.tensors import write_safetensors_atomic
from runtime.messages import Reference
from tests.unit.media_clips import (
    QUARTER_TURNS,
    grey,
    patch_matrix,
    tone,
    write_clip,
    write_counting,
    write_hdr,
    write_wav,
)


def test_content_hash_is_sha256_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 9000)
    want = hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest()
    assert content_hash(tmp_path / "a.bin") == want


def test_json_is_written_as_utf_8_into_a_new_folder(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "new" / "run.json", {"prompt": "été", "steps": 12})
    text = (tmp_path / "new" / "run.json").read_text(encoding="utf-8")
    assert "été" in text and json.loads(text) == {"prompt": "été", "steps": 12}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_json_that_cannot_be_written_keeps_the_older_file(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "run.json", [1])
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "run.json", float("nan"))
    assert json.loads((tmp_path / "run.json").read_text()) == [1]


def test_file_appears_only_when_whole(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.txt") as part:
        part.write_text("half")
        assert part.parent == tmp_path and not (tmp_path / "a.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_part_carries_the_id_of_the_process_that_writes_it(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.mp4") as part:
        part.touch()
        assert part.name == f"a.mp4.{os.getpid()}.part"


def test_only_parts_of_the_named_processes_are_removed(tmp_path: Path) -> None:
    for name in ("a.mp4.12.part", "a.mp4.112.part", "download.part", "b.mp4"):
        (tmp_path / name).touch()
    (tmp_path / "frames.13.part").mkdir()
    (tmp_path / "frames.13.part" / "00000.npy").touch()
    remove_parts(tmp_path, (12, 13))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["a.mp4.112.part", "b.mp4", "download.part"]


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match=r"/a leads nowhere .*loop"):
        local_file(tmp_path / "a")
    with pytest.raises(ValueError, match=r"~nosuchuser/a\.png leads nowhere"):
        local_file(Path("~nosuchuser/a.png"))


def test_interrupt_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_safetensors_keep_values_dtypes_and_metadata(tmp_path: Path) -> None:
    tensors = {"video": torch.randn(1, 24, 2, 4, 6).bfloat16(), "t": torch.randn(3, 4).T}
    write_safetensors_atomic(tmp_path / "a.safetensors", tensors, {"h3_run": '{"a": "é"}'})
    with safe_open(str(tmp_path / "a.safetensors"), framework="pt") as file:
        assert file.metadata() == {"h3_run": '{"a": "é"}'}
        assert all(torch.equal(file.get_tensor(name), want) for name, want in tensors.items())


def test_probe_of_a_turned_photo(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGBA", (40, 30)).save(tmp_path / "a.png", exif=exif)
    info = probe(tmp_path / "a.png")
    assert (info.kind, info.width, info.height, info.rotated) == ("image", 30, 40, True)
    assert info.has_alpha and info.frames == 1 and info.bytes == (tmp_path / "a.png").stat().st_size


def test_probe_of_a_turned_video_with_sound(tmp_path: Path) -> None:
    sound = tone(500, 0.5, 32_000)[None]
    path = write_clip(tmp_path / "a.mp4", [grey(50)] * 15, fps=30, sound=sound)
    patch_matrix(path, QUARTER_TURNS[90])
    info = probe(path)
    assert (info.kind, info.width, info.height, info.rotated) == ("video", 48, 64, True)
    assert (info.fps, info.frames, info.video_codec, info.hdr) == (30.0, 15, "h264", "")
    assert info.seconds == pytest.approx(0.5, abs=1e-3)
    assert (info.audio_codec, info.audio_channels, info.audio_rate) == ("aac", 1, 32_000)


@pytest.mark.parametrize(("transfer", "hdr"), [(1, ""), (16, "PQ"), (18, "HLG")])
def test_probe_names_hdr(tmp_path: Path, transfer: int, hdr: str) -> None:
    info = probe(write_hdr(tmp_path / "a.mp4", [0.5, 0.5], transfer))
    assert (info.hdr, info.video_codec) == (hdr, "hevc")


def test_probe_of_a_sound(tmp_path: Path) -> None:
    samples = np.zeros((2, 4410), np.int16)
    info = probe(write_wav(tmp_path / "a.wav", samples, 44_100))
    assert (info.kind, info.audio_channels, info.audio_rate) == ("audio", 2, 44_100)
    assert info.seconds == pytest.approx(0.1) and info.width == 0


def test_probe_goes_by_content_and_not_by_name(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.mp4")
    assert probe(tmp_path / "a.mp4").kind == "image"
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(ValueError, match="is not a readable picture, video or sound"):
        probe(tmp_path / "a.png")


def test_probing_needs_no_torch() -> None:
    code = "import sys, runtime.media.probe, runtime.media.mp4; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def options(frames: int = 22) -> LoadOptions:
    return LoadOptions(max_frames=frames)


def test_image_reference_is_one_float_frame(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), (255, 0, 51)).save(tmp_path / "a.png")
    media = load_reference(Reference(kind="image", path=tmp_path / "a.png"), options())
    assert media.pixels is not None and media.pixels.shape == (1, 30, 40, 3)
    assert media.pixels.dtype == torch.float32 and media.wave is None and media.rate == 0
    assert media.content_hash == content_hash(tmp_path / "a.png")


def test_sound_reference_names_its_rate_change(tmp_path: Path) -> None:
    path = write_wav(tmp_path / "a.wav", np.zeros((2, 4410), np.int16), 44_100)
    media = load_reference(Reference(kind="audio", path=path), options())
    assert media.pixels is None and media.wave is not None
    assert media.wave.shape == (1, 2, 4410) and media.rate == 44_100
    assert media.notes == ("44100 Hz -> 32000 Hz",)


def video_with_sound(path: Path) -> Path:
    sound = np.stack([tone(500, 1.25, 32_000), tone(700, 1.25, 32_000)])
    return write_clip(path, [grey(50)] * 30, sound=sound)


def test_video_reference_brings_its_whole_soundtrack(tmp_path: Path) -> None:
    path = video_with_sound(tmp_path / "a.mp4")
    media = load_reference(Reference(kind="video", path=path), options(22))
    assert media.pixels is not None and media.pixels.shape == (22, 48, 64, 3)
    assert media.wave is not None and media.wave.shape[2] / media.rate == pytest.approx(
        1.25, abs=0.04
    )
    assert media.notes[0] == "first 22 of 30 source frames used, the rest cut"
    assert media.notes[1].startswith("soundtrack of 1.2")
    assert media.content_hash == content_hash(path)


def test_muted_video_has_no_sound_and_another_hash(tmp_path: Path) -> None:
    path = video_with_sound(tmp_path / "a.mp4")
    media = load_reference(Reference(kind="video", path=path, mute=True), options(30))
    assert media.wave is None and media.rate == 0
    assert media.content_hash != content_hash(path)


def test_replaced_soundtrack_is_used_and_changes_the_hash(tmp_path: Path) -> None:
    path = video_with_sound(tmp_path / "a.mp4")
    other = write_wav(tmp_path / "b.wav", np.full((1, 8000), 16384, np.int16), 8000)
    media = load_reference(Reference(kind="video", path=path, soundtrack=other), options(30))
    assert media.wave is not None and media.rate == 8000
    assert torch.equal(media.wave, torch.full((1, 1, 8000), 0.5))
    assert media.content_hash not in (content_hash(path), content_hash(other))
    notes = [note for note in media.notes if note.startswith("soundtrack b.wav: ")]
    assert notes == [
        "soundtrack b.wav: mono, duplicated to stereo at full level",
        "soundtrack b.wav: 8000 Hz -> 32000 Hz",
    ]


def test_video_without_sound_has_none(tmp_path: Path) -> None:
    path = write_counting(tmp_path / "a.mp4", 5)
    media = load_reference(Reference(kind="video", path=path), options())
    assert media.wave is None and media.notes == ()


def test_sound_that_starts_before_the_pictures_is_aligned(tmp_path: Path) -> None:
    left = tone(500, 1.0, 32_000)
    left[:16_000] = 0
    path = write_clip(
        tmp_path / "a.mkv",
        [grey(50)] * 12,
        pts_ms=[500 + round(k * 1000 / 24) for k in range(12)],
        sound=np.stack([left, left]),
    )
    media = load_reference(Reference(kind="video", path=path), options())
    assert media.wave is not None
    assert media.wave.shape[2] == pytest.approx(16_000, abs=2100)
    assert media.wave[0, 0, 640:].abs().reshape(-1)[:640].max() > 0.3  # the tone starts at once
    assert any("of sound before the first picture cut" in note for note in media.notes)
