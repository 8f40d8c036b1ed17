"""A safetensors header is read strictly, without torch and without the data."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from runtime.checkpoints.header import CheckpointError, read_header
from tests.checkpoint_files import raw_file, read_all, tiny


def _entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_names_shapes_and_byte_ranges_equal_what_the_safetensors_library_reads(
    tmp_path: Path,
) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    header = read_header(path)
    tensors, metadata = read_all(path)
    data = path.read_bytes()
    assert header.metadata == metadata
    assert set(header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert info.shape == tuple(tensor.shape)
        assert data[info.start : info.end] == tensor.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("missing", [1, 1000, 1_500_000])
def test_a_truncated_file_is_refused_with_the_byte_counts(tmp_path: Path, missing: int) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[: whole - missing])
    with pytest.raises(CheckpointError, match="truncated") as error:
        read_header(path)
    assert str(whole) in str(error.value)
    assert str(whole - missing) in str(error.value)
    assert f"({missing} missing)" in str(error.value)


def test_a_file_that_ends_inside_its_header_is_refused_with_the_byte_counts(tmp_path: Path) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    needed = read_header(path).header_bytes
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=f"truncated.*{needed} bytes.*5000"):
        read_header(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path, "dit", "pruned_nvfp4")
    with path.open("ab") as file:
        file.write(b"12345")
    with pytest.raises(CheckpointError, match="5 bytes after its last tensor"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a safetensors file: it has 0 bytes"),
        (b"GGUF\x03\x00\x00\x00 and more", "a GGUF file"),
        (b"PK\x03\x04 and then some zip", "a zip archive"),
        (b"\x80\x02} a pickle of old", "a Python pickle"),
        (pickle.dumps({"weights": list(range(99))}), "a Python pickle"),
        (b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
        (b"just some text, long enough to be read", "not a safetensors file"),
    ],
)
def test_other_kinds_of_file_are_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_header(path)


@pytest.mark.parametrize("length", [0x280, 0x480, 0x04034B50])
def test_a_header_length_that_looks_like_another_format_is_read(
    tmp_path: Path, length: int
) -> None:
    text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(length)
    path = raw_file(tmp_path / "x.safetensors", text, b"12345678")
    assert read_header(path).tensors["a"].shape == (2,)


@pytest.mark.parametrize(
    ("header", "payload", "said"),
    [
        (b"{nonsense}", b"", "bad header JSON"),
        (b'{"a": 1, "a": 2}', b"", "names 'a' twice"),
        ({"a": {"dtype": "F32"}}, b"", "must have dtype, shape and data_offsets"),
        ({"a": _entry([2], 0, 8, "F31")}, b"12345678", "unknown dtype 'F31'"),
        ({"a": _entry([-2], 0, 8)}, b"12345678", "odd shape"),
        ({"a": _entry([2], 8, 0)}, b"12345678", "odd byte range"),
        ({"a": _entry([3], 0, 8)}, b"12345678", "needs 12 bytes, but the header gives it 8"),
        (
            {"a": _entry([2], 0, 8), "b": _entry([2], 4, 12)},
            b"123456789012",
            "b begins at .* overlaps a",
        ),
        (
            {"a": _entry([2], 0, 8), "b": _entry([2], 12, 20)},
            b"12345678901234567890",
            "b begins at .* leaves a hole after a",
        ),
        ({"__metadata__": {"a": 1}}, b"", "must map names to strings"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", "names 'dtype' twice"),
        (b'{"b": 1, "a": 1, "c": 1, "a": 2}', b"", "names 'a' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "bad header JSON: .*digits"),
        (b'{"a":' * 100_000, b"", "bad header JSON"),
        ({"a": _entry([2**63], 0, 8)}, b"12345678", "odd shape"),
        ({"a": _entry([2], 0, 10**30)}, b"12345678", "odd byte range"),
        ({"a\x1b[2J": _entry([2], 0, 8)}, b"12345678", r"'a\\x1b\[2J' has characters that do not"),
        ({"a\ud800": _entry([2], 0, 8)}, b"12345678", r"'a\\ud800' has characters that do not"),
        ({"a": _entry([2], 0, 8, ["F32"])}, b"12345678", "unknown dtype \\['F32'\\]"),  # type: ignore[arg-type]
    ],
)
def test_an_inconsistent_header_is_refused(
    tmp_path: Path, header: object, payload: bytes, said: str
) -> None:
    path = raw_file(tmp_path / "x.safetensors", header, payload)
    with pytest.raises(CheckpointError, match=said) as error:
        read_header(path)
    assert str(path) in str(error.value) and str(error.value).isprintable()


def test_a_header_of_200_000_names_of_which_one_stands_twice_is_refused_at_once(
    tmp_path: Path,
) -> None:
    names = b",".join([b'"a":1', *(b'"b%d":1' % n for n in range(200_000)), b'"b7":1'])
    path = raw_file(tmp_path / "x.safetensors", b"{" + names + b"}")
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match="names 'b7' twice"):
        read_header(path)
    assert time.perf_counter() - began < 10


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="/dev/zero is not an ordinary file"):
        read_header(Path("/dev/zero"))


@pytest.mark.parametrize(
    "module", ["header", "index", "classify", "modes", "layouts", "published", "roles"]
)
def test_the_module_is_importable_without_torch(module: str) -> None:
    code = f"import sys, runtime.checkpoints.{module}; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
