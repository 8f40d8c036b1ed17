"""Files that the checkout holds compressed appear beside themselves, whole or not at all."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import pytest

from runtime.packed_files import unpack

DEMO = Path(__file__).parents[2] / "presets" / "demo"


def test_unpacked_whole_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "a.bin.xz").write_bytes(lzma.compress(b"weights"))
    unpack(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "a.bin").read_bytes() == b"weights"
    (tmp_path / "out" / "a.bin").write_bytes(b"mine")
    unpack(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "a.bin").read_bytes() == b"mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.bin"]


def test_unpacked_again_after_an_update_of_the_checkout(tmp_path: Path) -> None:
    packed, out = tmp_path / "a.bin.xz", tmp_path / "out"
    packed.write_bytes(lzma.compress(b"weights"))
    unpack(tmp_path, out)
    packed.write_bytes(lzma.compress(b"new weights"))
    later = (out / "a.bin").stat().st_mtime_ns + 10**9
    os.utime(packed, ns=(later, later))
    unpack(tmp_path, out)
    assert (out / "a.bin").read_bytes() == b"new weights"


@pytest.mark.parametrize("cut", [0, 20, 40])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, cut: int) -> None:
    (tmp_path / "a.bin.xz").write_bytes(lzma.compress(b"weights" * 99)[:cut])
    with pytest.raises(ValueError, match=r"a\.bin\.xz is damaged .*; restore it"):
        unpack(tmp_path, tmp_path)
    assert not (tmp_path / "a.bin").exists()


def test_the_demo_is_the_goldens() -> None:
    """The parity tests hold its bits to ComfyUI's; here: every packed file has its twin."""
    packed = sorted(path.stem for path in DEMO.glob("*.xz"))
    assert packed == sorted(path.name for path in DEMO.glob("*.safetensors"))
    assert len(packed) == 4
    for name in packed:
        assert lzma.decompress((DEMO / f"{name}.xz").read_bytes()) == (DEMO / name).read_bytes()
