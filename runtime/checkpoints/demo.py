"""Random checkpoints in the published layouts: streamed to a file or straight into the loader."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoints.file import TORCH_DTYPES, IndexedCheckpoint
from runtime.checkpoints.header import Header, TensorInfo
from runtime.checkpoints.index import build_index
from runtime.checkpoints.layouts import Layout, TensorSpec
from runtime.checkpoints.published import published

# A tensor repeats one random block from its own starting point. A prime length keeps the rows of a
# matrix different from each other.
_BLOCK_NUMBERS = {"full": 4_194_301, "tiny": 65_537}
_FP4_RMS = 2.926  # of the 16 e2m1 values, equally likely
_INT8_RMS = 73.9  # of the 256 int8 values, equally likely
_FP8_STD = 96.0
_SCALE_MEAN, _SCALE_STD = 192.0, 32.0  # NVFP4 block scales, well inside e4m3
_SCALE_RMS = 194.6
_LARGEST_ACTIVATION = 6.0  # the static input scale of an NVFP4 layer is this over 6 * 448
_FILTER = (0.00202896, 0.00938947, -0.02554346, -0.05765738, 0.12857258, 0.44320980)
_GIB = 1 << 30

WriteProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """Normal numbers with this mean and deviation; "bytes" fills are uniform instead."""

    mean: float
    std: float
    bytes: bool = False


class RandomSource:
    """The bytes of a random file, made on request, the same for one seed on every device."""

    def __init__(self, layout: Layout, *, size: str, seed: int) -> None:
        self._numbers = _BLOCK_NUMBERS[size]
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._normal = torch.randn(self._numbers, generator=generator)
        self._uniform = torch.randint(
            0, 256, (self._numbers,), dtype=torch.uint8, generator=generator
        )
        self._blocks: dict[tuple[str, _Spread, torch.device], Tensor] = {}
        self._specs: dict[int, TensorSpec] = {}
        position = len(layout.header())
        for spec in layout.tensors:
            if spec.nbytes:
                self._specs[position] = spec
            position += spec.nbytes

    def read(self, start: int, nbytes: int, device: torch.device) -> Tensor:
        """The whole tensor that begins at byte `start`, as a uint8 vector."""
        spec = self._specs[start]
        if nbytes != spec.nbytes:
            raise ValueError(f"{spec.name} has {spec.nbytes} bytes, asked for {nbytes}")
        out = torch.empty(nbytes, dtype=torch.uint8, device=device)
        position = 0
        for piece in self.pieces(spec, device):
            out[position : position + piece.numel()] = piece
            position += piece.numel()
        return out

    def pieces(self, spec: TensorSpec, device: torch.device) -> Iterator[Tensor]:
        """The tensor's bytes as views of shared blocks, in order."""
        special = _special(spec, self._seed)
        if special is not None:
            yield special.contiguous().view(-1).view(torch.uint8).to(device)
            return
        block = self._block(spec.dtype, _spread(spec), device)
        size = block.numel() // self._numbers
        at = (zlib.crc32(spec.name.encode()) % self._numbers) * size
        left = spec.nbytes
        while left:
            piece = block[at : at + left]
            yield piece
            left -= piece.numel()
            at = 0

    def _block(self, dtype: str, spread: _Spread, device: torch.device) -> Tensor:
        key = (dtype, spread, device)
        if key not in self._blocks:
            if spread.bytes:
                block = self._uniform
            else:
                block = self._normal * spread.std + spread.mean
                if dtype == "F8_E4M3":
                    block = block.clamp(-448, 448)
                block = block.to(TORCH_DTYPES[dtype]).view(torch.uint8)
            self._blocks[key] = block.to(device)
        return self._blocks[key]


def random_checkpoint(role: str, *, size: str, format: str, seed: int = 0) -> IndexedCheckpoint:
    """An in-memory checkpoint: the bytes of write_random, made on the asking device.

    The way to run the 62 GiB bf16 DiT without writing it. Formats as in published().
    """
    layout = published(role, size=size, format=format)
    return checkpoint_of(layout, role, size=size, name=f"{size}/{role}/{format}", seed=seed)


def checkpoint_of(
    layout: Layout, role: str, *, size: str, name: str, seed: int = 0
) -> IndexedCheckpoint:
    """The same for any layout; size: how many different numbers there are."""
    source = RandomSource(layout, size=size, seed=seed)
    header = header_of(layout, Path(f"random:{name}"))
    cpu = torch.device("cpu")

    def read(info: TensorInfo) -> bytes:
        return source.read(info.start, info.nbytes, cpu).numpy().tobytes()

    return IndexedCheckpoint(build_index(header, role, read), role, source)


def write_random(
    path: Path,
    role: str,
    *,
    size: str,
    format: str,
    seed: int = 0,
    progress: WriteProgress | None = None,
) -> int:
    """Write a random checkpoint file and return its size in bytes, as write_layout does."""
    layout = published(role, size=size, format=format)
    return write_layout(path, layout, size=size, seed=seed, progress=progress)


def write_layout(
    path: Path, layout: Layout, *, size: str, seed: int, progress: WriteProgress | None = None
) -> int:
    """Write random tensors of any layout; size: how many different numbers there are.

    Streams block by block into a temporary file beside `path`, which is synced and renamed at the
    end. Raises ValueError when the disk cannot hold it.
    """
    header = layout.header()
    total = len(header) + layout.payload_bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_space(path.parent, total)
    source = RandomSource(layout, size=size, seed=seed)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            done = _write(file.fileno(), header)
            for spec in layout.tensors:
                for piece in source.pieces(spec, torch.device("cpu")):
                    done += _write(file.fileno(), piece.numpy().data)
                if progress is not None:
                    progress(done, total)
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return total


def _write(fd: int, data: bytes | memoryview) -> int:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def _check_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ValueError(
            f"{folder} has {free / _GIB:.1f} GiB free, this file needs {need / _GIB:.1f} GiB; "
            "free some space or give another --out"
        )


def header_of(layout: Layout, path: Path) -> Header:
    """What read_header gives for the file that write_layout makes of it."""
    begin = position = len(layout.header())
    tensors: dict[str, TensorInfo] = {}
    for spec in layout.tensors:
        end = position + spec.nbytes
        tensors[spec.name] = TensorInfo(dtype=spec.dtype, shape=spec.shape, start=position, end=end)
        position = end
    return Header(
        path=path,
        tensors=tensors,
        metadata=layout.metadata,
        header_bytes=begin,
        file_bytes=position,
    )


def _spread(spec: TensorSpec) -> _Spread:
    """Mean and deviation that keep activations near 1 through every block."""
    layer, _, suffix = spec.name.rpartition(".")
    if spec.columns:
        return _quantised_spread(spec, suffix)
    if suffix == "bias" and "adaln_proj" in layer:
        return _Spread(mean=0.0, std=0.1)
    if suffix.endswith("bias"):
        return _Spread(mean=0.0, std=0.02)
    if suffix in ("scale1", "scale2"):
        return _Spread(mean=0.3, std=0.05)
    if suffix == "alpha" and layer.startswith("encoder"):
        return _Spread(mean=1.0, std=0.1)
    if suffix in ("alpha", "beta"):  # decoder: stored as logarithms
        return _Spread(mean=0.0, std=0.1)
    if suffix == "latents_std" or (suffix == "weight" and len(spec.shape) == 1):
        return _Spread(mean=1.0, std=0.1)
    if suffix in ("latents_mean", "register_tokens", "mask_token"):
        return _Spread(mean=0.0, std=0.3)
    return _Spread(mean=0.0, std=_weight_std(layer, spec.shape))


def _weight_std(layer: str, shape: tuple[int, ...]) -> float:
    if layer.endswith(("embed_tokens", "pos_embed")):
        return 0.3
    if layer.startswith("decoder.ups."):  # transposed: [in, out, kernel], stride (kernel + 1) // 2
        return (shape[0] * shape[2] / ((shape[2] + 1) // 2)) ** -0.5
    gain = 0.3 if "adaln_proj" in layer else 1.0
    return gain * prod(shape[1:]) ** -0.5


def _quantised_spread(spec: TensorSpec, suffix: str) -> _Spread:
    layer = spec.name.rpartition(".")[0]
    std = _weight_std(layer, (spec.rows, spec.columns))
    if suffix == "weight":
        if spec.dtype == "F8_E4M3":
            return _Spread(mean=0.0, std=_FP8_STD)
        return _Spread(mean=0.0, std=0.0, bytes=True)
    if suffix == "weight_scale" and spec.dtype == "F8_E4M3":
        return _Spread(mean=_SCALE_MEAN, std=_SCALE_STD)
    if suffix == "weight_scale":
        return _Spread(mean=std / _INT8_RMS, std=0.1 * std / _INT8_RMS)
    return _Spread(mean=1.0, std=0.1)  # pre_quant_scale


def _special(spec: TensorSpec, seed: int) -> Tensor | None:
    """Tensors whose values follow a rule instead of a distribution."""
    leaf = spec.name.rpartition(".")[2]
    if spec.marker:
        return torch.tensor(list(spec.marker.encode()), dtype=torch.uint8)
    if leaf == "inv_freq":
        size = spec.shape[0]
        return 10000.0 ** (-torch.arange(size, dtype=torch.float64) / size).float()
    if leaf == "adaln_t_table":
        return _time_table(spec.shape, seed)
    if leaf == "filter":
        return torch.tensor(_FILTER + _FILTER[::-1])
    if leaf == "zero_k_bias":
        return torch.zeros(spec.shape)
    if spec.columns and not spec.shape:
        std = _weight_std(spec.name.rpartition(".")[0], (spec.rows, spec.columns))
        if leaf == "input_scale":
            return torch.tensor(_LARGEST_ACTIVATION / (6 * 448))
        divisor = _FP4_RMS * _SCALE_RMS if leaf == "weight_scale_2" else _FP8_STD
        return torch.tensor(std / divisor)
    if leaf == "weight_scale" and spec.dtype == "F8_E4M3":
        return _padded_scales(spec, seed)
    return None


def _time_table(shape: tuple[int, ...], seed: int) -> Tensor:
    """[grid, rank]: smooth curves over t that get smaller with the rank, as an SVD's do."""
    grid, rank = shape
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(rank, generator=generator)
    order = torch.arange(1, rank + 1)
    t = torch.linspace(0, 1, grid)[:, None]
    return torch.cos(torch.pi * (order * t + phase)) * 2.0 / order


def _padded_scales(spec: TensorSpec, seed: int) -> Tensor | None:
    """Block scales of a layer that does not fill its 128x4 tiles: zero outside (contract 8.3)."""
    rows, blocks = spec.shape
    if (rows, blocks) == (spec.rows, spec.columns // 16):
        return None
    generator = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
    scales = torch.randn(rows, blocks, generator=generator) * _SCALE_STD + _SCALE_MEAN
    scales[spec.rows :] = 0
    scales[:, spec.columns // 16 :] = 0
    tiles = scales.view(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.contiguous().view(rows, blocks).to(torch.float8_e4m3fn)
