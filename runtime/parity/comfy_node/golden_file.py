"""A recording and what belongs to it as one golden file (the format of docs/goldens.md)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PACKAGES = ("torch", "comfy-kitchen", "sageattention", "safetensors", "numpy", "scipy", "pillow")


def write(path: Path, tensors: Mapping[str, Tensor], header: dict[str, Any]) -> Path:
    """Writes all or nothing; the header gains the digest of the tensors' bytes."""
    kept = {name: tensors[name].contiguous() for name in sorted(tensors)}
    header = {**header, "content_sha256": digest(kept)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(kept, str(part), metadata={"header": json.dumps(header, default=str)})
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes in the order of names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        sha.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def environment() -> dict[str, Any]:
    """Versions, device and arguments of this ComfyUI; "unknown" where nothing tells."""
    cuda = torch.cuda.is_available()
    return {
        "comfyui_version": _comfyui_version(),
        "comfyui_commit": _commit(Path(sys.argv[0]).resolve().parent),
        "argv": sys.argv[1:],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": str(torch.version.cuda),
        **{name.replace("-", "_"): _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _comfyui_version() -> str:
    try:
        return str(importlib.import_module("comfyui_version").__version__)
    except (ImportError, AttributeError):
        return "unknown"


def _commit(root: Path) -> str:
    """The commit of a git checkout, read from its files."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        ref = head.removeprefix("ref: ")
        if (git / ref).is_file():
            return (git / ref).read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next(line.split()[0] for line in packed if line.endswith(f" {ref}"))
    except (OSError, StopIteration):
        return "unknown"
