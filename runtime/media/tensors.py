"""Latents and other tensors as safetensors: written whole or not at all, and latents read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
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


def read_pair(path: Path, holds: str) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Tensors "video" and "audio" of a latents file, and its metadata.

    holds: what such a file has, for the ValueError of one that lacks a tensor; another for a file
    that cannot be read.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            missing = sorted({"video", "audio"} - set(file.keys()))
            if missing:
                raise ValueError(f"{path} holds no tensor {' and '.join(missing)}; {holds}")
            video, audio = (file.get_tensor(name).clone() for name in ("video", "audio"))
            return video, audio, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
