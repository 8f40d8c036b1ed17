"""Pictures of a replay: golden, ours and the difference as a heat map, frame by frame, as PNG."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from runtime.media.files import part_of
from runtime.parity.frames import Frame, join_of, measured
from runtime.parity.report import Document, number

SIDES = ("golden", "ours", "difference")
_STOPS = (  # black, violet, red, orange, pale yellow: brightness grows with the difference
    (0, 0, 4),
    (60, 15, 110),
    (150, 40, 100),
    (220, 75, 50),
    (250, 160, 20),
    (252, 255, 200),
)


def palette() -> NDArray[np.uint8]:
    """[256,3]: the colours of the heat map; no two entries are equal, so it can be read back."""
    at = np.linspace(0, len(_STOPS) - 1, 256)
    columns = np.array(_STOPS, dtype=np.float64).T
    mixed = [np.interp(at, np.arange(len(_STOPS)), column) for column in columns]
    return np.stack(mixed, axis=1).round().astype(np.uint8)


def write_frames(folder: Path, source: str, want: Tensor, got: Tensor) -> Document:
    """Fills `folder` (whole or not at all) and says what is in it.

    want, got: [T,H,W,3] in [0,1]. A difference picture holds the largest difference of the three
    channels over the frame's own largest value ("scale"), so that small ones stay visible.
    """
    want, got = want.float().cpu(), got.float().cpu()
    if want.shape != got.shape:
        return {"reason": f"the golden's pictures are {_size(want)}, ours {_size(got)}"}
    part = part_of(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        rows = [_frame(part, n, want, got) for n in range(len(want))]
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return {
        "folder": folder.name,
        "source": source,
        "count": len(rows),
        "height": want.shape[1],
        "width": want.shape[2],
        "joins": sorted({row["join"] for row in rows if row["join"] is not None}),
        "palette": [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in palette().tolist()],
        "frames": rows,
    }


def picture_name(side: str, frame: int) -> str:
    """The file of one side of one frame."""
    return f"{side}_{frame:04d}.png"


def _frame(folder: Path, n: int, want: Tensor, got: Tensor) -> dict[str, object]:
    golden, ours = _array(want[n]), _array(got[n])
    difference = np.nan_to_num(np.abs(golden - ours).max(axis=2), nan=np.inf)
    finite = difference[np.isfinite(difference)]
    scale = float(finite.max()) if finite.size else 0.0
    levels = np.where(np.isfinite(difference), difference / (scale or 1.0), 1.0)
    heat = Image.fromarray((levels * 255).round().astype(np.uint8), mode="P")
    heat.putpalette(palette().tobytes())
    heat.save(folder / picture_name("difference", n))
    for side, frame in (("golden", golden), ("ours", ours)):
        clean = np.nan_to_num(frame, nan=0.0).clip(0, 1)
        Image.fromarray((clean * 255).round().astype(np.uint8)).save(folder / picture_name(side, n))
    figures = asdict(measured(golden, ours).figures())
    return {
        "frame": n,
        "join": join_of(n, len(want)),
        "scale": scale,
        **{k: v if isinstance(v, bool) else number(v) for k, v in figures.items()},
    }


def _array(frame: Tensor) -> Frame:
    return np.ascontiguousarray(frame.numpy(), dtype=np.float32)


def _size(frames: Tensor) -> str:
    return "x".join(map(str, frames.to(torch.float32).shape))
