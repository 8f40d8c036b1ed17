"""Writing latents and other tensors as safetensors: the whole file or none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from runtime.media.files import write_bytes_atomic


def write_safetensors_atomic(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes CPU or device tensors under their names; raises DiskFullError when the disk is full.

    The file is built in memory first (latents are a few MiB), so that a full disk is an OSError.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes_atomic(path, save(own, metadata=dict(metadata)))
