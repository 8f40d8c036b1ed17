"""Checkpoint files of ComfyUI: one file per on-disk format, header-first, lazy, strict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.checkpoints import fp8, int8, nvfp4
from runtime.checkpoints.layer import Format

if TYPE_CHECKING:
    from runtime.checkpoints.base import Checkpoint

_FILES = (nvfp4, fp8, int8)

FORMATS: Mapping[str, Format] = {
    marker: file.FORMAT for file in _FILES for marker in file.FORMAT.markers
}


def open_checkpoint(path: Path, role: str) -> Checkpoint:
    """Open a checkpoint: header, prefix and markers are read and checked, tensors are not.

    role: dit | text_encoder | video_vae | audio_vae. Raises CheckpointError on a broken file, on a
    file of another role and on any quantisation this runtime cannot decode, named by format and
    layer (contract 1.2, 8).
    """
    # Here and not above: the console imports this package's header and index without torch.
    from runtime.checkpoints.file import open_file

    return open_file(path, role)
