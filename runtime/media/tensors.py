"""Latents and other tensors as safetensors: written whole or not at all, and latents read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from runtime.media.files import write_bytes_atomic
from runtime.media.latents import LatentsForm, check_latents


def write_safetensors_atomic(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes CPU or device tensors under their names; raises DiskFullError when the disk is full.

    The file is built in memory first (latents are a few MiB), so that a full disk is an OSError.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes_atomic(path, save(own, metadata=dict(metadata)))


def read_pair(path: Path, form: LatentsForm) -> tuple[Tensor, Tensor, Any]:
    """Tensors "video" and "audio" of a latents file, and what check_latents gives of it.

    ValueError for a file of another form, and for one that cannot be read.
    """
    request = check_latents(path, form)
    try:
        with safe_open(str(path), framework="pt") as file:
            video, audio = (file.get_tensor(name).clone() for name in ("video", "audio"))
            return video, audio, request
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
