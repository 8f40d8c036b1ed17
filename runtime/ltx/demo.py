"""Random LTX denoisers in the published layout: a file, or made on the asking device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from runtime.checkpoints.demo import RandomSource, WriteProgress, header_of, write_layout
from runtime.checkpoints.header import TensorInfo
from runtime.ltx.census import read_census
from runtime.ltx.load import LTXCheckpoint
from runtime.ltx.orders import PUBLISHED
from runtime.ltx.published import FORMATS, published

DEFAULT_FORMAT = FORMATS[0]


def write_denoiser(
    path: Path, *, size: str, format: str, seed: int = 0, progress: WriteProgress | None = None
) -> int:
    """Write the file and return its bytes. size: full | tiny; format: one of FORMATS.

    ValueError for another word and when the disk cannot hold it.
    """
    layout = published(size, format)
    return write_layout(path, layout, size=size, seed=seed, progress=progress)


def random_denoiser(size: str, format: str, seed: int = 0) -> LTXCheckpoint:
    """The same weights without a file, as a benchmark of a model that is not here wants them."""
    layout = published(size, format)
    source = RandomSource(layout, size=size, seed=seed)
    header = header_of(layout, Path(f"random:ltx/{size}/{format}"))
    census = read_census(header, partial(_read, source))
    return LTXCheckpoint(census, source, PUBLISHED)


def _read(source: RandomSource, info: TensorInfo) -> bytes:
    return source.read(info.start, info.nbytes, torch.device("cpu")).numpy().tobytes()
