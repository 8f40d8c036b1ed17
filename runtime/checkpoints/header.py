"""Reads the header of a safetensors file, strictly and without torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

# Bits of one element. Sub-byte types exist in the file format; they are refused on use.
BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_OTHER_FORMATS = {
    b"GGUF": "a GGUF file",
    b"PK\x03\x04": "a zip archive (a PyTorch .pt file?)",
    **{bytes((0x80, protocol)): "a Python pickle" for protocol in range(2, 6)},
    b"version ": "a git-lfs pointer, not the file itself",
}


# `license` of the headers that make-demo writes: of such files nothing has to be acknowledged
RANDOM_WEIGHTS = "Apache-2.0, random weights"


class CheckpointError(ValueError):
    """The file cannot be used; the message names file, tensor or layer, and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the file; start and end are byte offsets from the beginning of the file."""

    dtype: str  # safetensors name: F32, BF16, F8_E4M3, U8 ...
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the file says it holds; tensors in file order."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    header_bytes: int  # length word (8) + JSON: where the data begins
    file_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.file_bytes - self.header_bytes


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; no tensor data is read.

    Raises CheckpointError when the file is missing, of another format, truncated, or when the
    bytes of a tensor overlap, leave a hole or do not fit its dtype and shape (contract 8).
    """
    if not path.is_file():
        there = "is not an ordinary file" if path.exists() else "does not exist"
        kind = "is a folder" if path.is_dir() else there
        raise CheckpointError(f"{path} {kind}; give the path of a .safetensors file")
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        start = file.read(9)
        json_bytes = _json_length(path, start, file_bytes)
        file.seek(8)
        text = file.read(json_bytes)
    entries = _parse(path, text)
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    data_start = 8 + json_bytes
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in entries.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_ranges(path, tensors, data_start, file_bytes)
    return Header(
        path=path,
        tensors=tensors,
        metadata=metadata,
        header_bytes=data_start,
        file_bytes=file_bytes,
    )


def read_bytes(header: Header, info: TensorInfo) -> bytes:
    """The stored bytes of one small tensor."""
    with header.path.open("rb") as file:
        file.seek(info.start)
        return file.read(info.nbytes)


def _json_length(path: Path, start: bytes, file_bytes: int) -> int:
    length = int.from_bytes(start[:8], "little")
    begins_right = start[8:9] == b"{" and 2 <= length <= MAX_HEADER_BYTES
    for magic, name in _OTHER_FORMATS.items():
        if start.startswith(magic) and not begins_right:  # a length of 640 begins as a pickle does
            raise CheckpointError(f"{path} is {name}; only safetensors files are supported")
    if file_bytes < 10:
        raise CheckpointError(
            f"{path} is not a safetensors file: it has {file_bytes} bytes; download it again"
        )
    if not begins_right:
        raise CheckpointError(
            f"{path} is not a safetensors file: it does not begin with a header length and JSON"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header alone needs {8 + length} bytes, "
            f"the file has {file_bytes}; download it again"
        )
    return length


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path} names {twice!r} twice in its header")
        return found

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise CheckpointError(
            f"{path} is not a safetensors file: bad header JSON: {error}"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    return entries


def _metadata(path: Path, found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    return found


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not name.isprintable():
        raise CheckpointError(f"{path}: the tensor name {name!a} has characters that do not print")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: the header entry of {name} must have dtype, shape and data_offsets, "
            f"got {entry!s:.80}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {dtype!r}")
    if not _counts(shape):
        raise CheckpointError(f"{path}: {name} has the odd shape {shape!r}")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has the odd byte range {offsets!r}")
    want, got = prod(shape) * BITS[dtype], 8 * (offsets[1] - offsets[0])
    if want != got:
        raise CheckpointError(
            f"{path}: {name} is {dtype} {shape}, which needs {-(-want // 8)} bytes, "
            f"but the header gives it {got // 8}"
        )
    return TensorInfo(
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + offsets[0],
        end=data_start + offsets[1],
    )


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_ranges(
    path: Path, tensors: Mapping[str, TensorInfo], data_start: int, file_bytes: int
) -> None:
    end = max((info.end for info in tensors.values()), default=data_start)
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header promises {end} bytes, the file has {file_bytes} "
            f"({end - file_bytes} missing); download it again"
        )
    position, previous = data_start, "the header"
    for name, info in tensors.items():
        if info.start != position:
            word = "overlaps" if info.start < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: {name} begins at byte {info.start} and {word} {previous}, "
                f"which ends at {position}"
            )
        position, previous = info.end, name
    if position != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes - position} bytes after its last tensor: {file_bytes} bytes, "
            f"the header describes {position}"
        )
