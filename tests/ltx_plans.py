"""Plans of family ltx over files that only look like the models, for tests without an engine."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from runtime.messages import ModelFiles, Plan

FOLDERS = ("text_encoder", "video_vae", "audio_vae", "vocoder", "upsampler")


def denoiser(path: Path, license: str | None) -> Path:
    """A safetensors file without tensors whose header says this of its licence."""
    metadata = {"model_version": "2.5.0"} | ({} if license is None else {"license": license})
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def plan_of(folder: Path, license: str | None = "LTX-2.x Community License") -> Plan:
    """A plan whose five folders are there and whose denoiser is such a file."""
    for part in FOLDERS:
        (folder / part).mkdir(parents=True, exist_ok=True)
    parts = {part: folder / part for part in FOLDERS}
    models = ModelFiles(dit=denoiser(folder / "dit.safetensors", license), **parts)  # type: ignore[arg-type]
    return Plan(
        name="mine",
        models=models,
        family="ltx",
        device="cpu",
        dtype="fp32",
        video_vae_dtype="fp32",
        threads=1,
    )
