"""Checkpoint files of the published size that take no disk: headers, markers, and holes."""

from __future__ import annotations

from pathlib import Path

from runtime.checkpoints.published import published

FORMATS = {
    "dit": "pruned_nvfp4",
    "text_encoder": "nvfp4_awq",
    "video_vae": "fp16",
    "audio_vae": "fp32",
}


def write_sparse(path: Path, role: str, format: str) -> Path:
    """A file with the published header; every weight is a hole that reads as zeros."""
    layout = published(role, size="full", format=format)
    header = layout.header()
    with path.open("wb") as file:
        file.write(header)
        position = len(header)
        for tensor in layout.tensors:
            if tensor.marker:
                file.seek(position)
                file.write(tensor.marker.encode().ljust(tensor.nbytes))
            position += tensor.nbytes
        file.truncate(position)
    return path


def write_set(folder: Path, **formats: str) -> dict[str, Path]:
    """The four files of a plan; formats: role -> another than that of the NVFP4 plan."""
    chosen = FORMATS | formats
    return {
        role: write_sparse(folder / f"{role}.safetensors", role, format)
        for role, format in chosen.items()
    }
