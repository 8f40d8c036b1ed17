"""Random LTX models: the denoiser in the published layout, as a file or made on the asking device,
and tiny folders of everything around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from runtime.checkpoints.demo import RandomSource, WriteProgress, header_of, write_layout
from runtime.checkpoints.header import TensorInfo
from runtime.ltx.census import read_census
from runtime.ltx.config import LTXConfig
from runtime.ltx.load import LTXCheckpoint
from runtime.ltx.orders import PUBLISHED
from runtime.ltx.published import FORMATS, GEMMA_SOURCE, published
from runtime.ltx.tiny_components import write_tiny_components

DEFAULT_FORMAT = FORMATS[0]


def write_denoiser(
    path: Path, *, size: str, format: str, seed: int = 0, progress: WriteProgress | None = None
) -> int:
    """Write the file and return its bytes. size: full | tiny; format: one of FORMATS.

    ValueError for another word and when the disk cannot hold it.
    """
    layout = published(size, format)
    return write_layout(path, layout, size=size, seed=seed, progress=progress)


def write_components(folder: Path, *, size: str, format: str, seed: int = 0) -> Mapping[str, Path]:
    """The folders around a tiny denoiser by part; none of full size, which nobody makes here.

    Unavailable without the extra `ltx`.
    """
    if size != "tiny":
        return {}
    config = LTXConfig.from_header(published(size, format).metadata)
    gemma = json.loads(GEMMA_SOURCE)["gemma_version"]
    return asdict(write_tiny_components(folder, config, gemma_version=gemma, seed=seed))


def random_denoiser(size: str, format: str, seed: int = 0) -> LTXCheckpoint:
    """The same weights without a file, as a benchmark of a model that is not here wants them."""
    layout = published(size, format)
    source = RandomSource(layout, size=size, seed=seed)
    header = header_of(layout, Path(f"random:ltx/{size}/{format}"))
    census = read_census(header, partial(_read, source))
    return LTXCheckpoint(census, source, PUBLISHED)


def _read(source: RandomSource, info: TensorInfo) -> bytes:
    return source.read(info.start, info.nbytes, torch.device("cpu")).numpy().tobytes()
