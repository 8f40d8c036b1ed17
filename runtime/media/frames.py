"""A folder of float frames, one .npy each: what parity compares, and all that needs no PyAV."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from runtime.media.files import part_of


def write_frames(folder: Path, chunks: Iterable[ArrayLike]) -> int:
    """Write float32 [H,W,3] frames as folder/00000.npy ...; the folder appears when all are there.

    chunks: [N,H,W,3] each, one alive at a time. Returns the number of frames. ValueError if the
    folder exists already.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another output folder")
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    count = 0
    try:
        for chunk in chunks:
            for frame in np.asarray(chunk, dtype=np.float32):
                np.save(part / f"{count:05d}.npy", frame, allow_pickle=False)
                count += 1
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return count


def read_frame(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """One frame [H,W,3] float32."""
    return np.load(path, allow_pickle=False)
