"""Parts of LTX that diffusers computes, from local folders in its own layout, loaded strictly.

A folder holds config.json and safetensors. No name is ever looked up anywhere else, and a file that
does not fit its class to the last tensor is refused before anything reaches the device.
"""

from __future__ import annotations

import importlib
import inspect
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.load import LoadReport
from runtime.kernels.unavailable import Unavailable

CONFIG = "config.json"
DIFFUSION_DECODER_KEY = "conv_in_x_t.weight"  # of Lightricks' file and of diffusers' module
STATISTICS = ("latents_mean", "latents_std")  # applied to fp32 latents: fp32 in every dtype
_LISTED = 5


def library(name: str) -> Any:
    """The module `name` of diffusers or transformers; Unavailable where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.split(".")[0]
        reason = f"{top} cannot be imported ({error}); install the extra with pip install '.[ltx]'"
        raise Unavailable("ltx components", reason) from error


def component_folder(path: Path, part: str) -> Path:
    """`path` if it is a folder with a config.json; CheckpointError naming the part otherwise."""
    wanted = f"a local folder with {CONFIG} and safetensors, as diffusers and transformers write it"
    if path.is_file() and _is_diffusion_decoder(_names(path)):
        raise CheckpointError(_diffusion_decoder(path))
    if not path.is_dir():
        kind = "a file" if path.is_file() else "no existing folder"
        raise CheckpointError(f"{path} is {kind}, but the {part} is given as {wanted}")
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} holds no {CONFIG}, but the {part} is given as {wanted}")
    return path


def component_config(folder: Path) -> dict[str, Any]:
    """What config.json says; CheckpointError if it is no JSON object."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} must hold an object, got {type(config).__name__}")
    return config


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which safetensors file of the folder holds which tensor; each name in one file only."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name in _names(path):
            if name in found:
                raise CheckpointError(
                    f"{folder} holds {name} both in {found[name].name} and in {path.name}; "
                    f"keep one variant of the weights"
                )
            found[name] = path
    if not found:
        raise CheckpointError(f"{folder} holds no tensors in any *.safetensors file")
    return found


def read_tensors(
    files: Mapping[str, Path], names: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """All tensors of `files` (tensor_files) on the CPU, or those that `names` maps to new names."""
    wanted = {name: name for name in files} if names is None else names
    out: dict[str, Tensor] = {}
    for path in sorted({files[name] for name in wanted}):
        with safe_open(str(path), framework="pt") as file:
            for name in (n for n in wanted if files[n] == path):
                out[wanted[name]] = file.get_tensor(name)
    return out


def load_component(
    path: Path, part: str, class_name: str, *, module: str, device: torch.device, dtype: torch.dtype
) -> tuple[Any, LoadReport]:
    """The class `class_name` of `module`, built from its folder's config, in eval mode.

    CheckpointError: no such folder, another class, options that the installed class does not know,
    tensors missing, left over, of another shape or not finite.
    """
    began = time.perf_counter()
    folder = component_folder(path, part)
    files = tensor_files(folder)
    if _is_diffusion_decoder(files):
        raise CheckpointError(_diffusion_decoder(folder))
    config = component_config(folder)
    cls = getattr(library(module), class_name)
    _check_class(folder, part, config, cls)
    with torch.device(device):
        built: nn.Module = cls.from_config(config)
    # diffusers' own `to` warns of an empty list of modules that should stay in float32
    built = nn.Module.to(built, dtype).eval().requires_grad_(False)
    for name in STATISTICS:
        if hasattr(built, name):
            setattr(built, name, getattr(built, name).float())
    tensors = read_tensors(files)
    _fill(built, tensors, folder)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    return built, LoadReport(bytes=total, seconds=time.perf_counter() - began)


def check_option(folder: Path, config: Mapping[str, Any], name: str, allowed: object) -> None:
    """CheckpointError unless the class's option has the one value that is implemented."""
    if config[name] != allowed:
        raise CheckpointError(
            f"{folder / CONFIG} says {name} {config[name]!r}, but LTX-2.5 has {allowed!r}"
        )


def _check_class(folder: Path, part: str, config: Mapping[str, Any], cls: type) -> None:
    given = config.get("_class_name")
    if given != cls.__name__:
        raise CheckpointError(
            f"{folder / CONFIG} is of class {given!r}, but the {part} must be a {cls.__name__}"
        )
    known = set(inspect.signature(cls.__init__).parameters)  # type: ignore[misc]
    strange = sorted(k for k in config if not k.startswith("_") and k not in known)
    if strange:
        raise CheckpointError(
            f"{folder / CONFIG} has {', '.join(strange[:_LISTED])}, which the installed diffusers' "
            f"{cls.__name__} does not know; it was written by another version"
        )


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy every tensor into the module's parameter or buffer of its name."""
    own = module.state_dict()
    problems = [f"{name} is missing" for name in own if name not in tensors]
    for name, tensor in tensors.items():
        if name not in own:
            problems.append(f"{name} is left over")
        elif tensor.shape != own[name].shape:
            want, got = list(own[name].shape), list(tensor.shape)
            problems.append(f"{name} is {got}, expected {want}")
    if problems:
        more = len(problems) - _LISTED
        told = "; ".join(problems[:_LISTED]) + (f"; {more} more" if more > 0 else "")
        raise CheckpointError(f"{folder} does not fit {type(module).__name__}: {told}")
    for name, tensor in tensors.items():
        target = own[name].copy_(tensor)
        if not bool(torch.isfinite(target).all()):
            raise CheckpointError(f"{folder}: {name} holds NaN or infinity")


def _names(path: Path) -> list[str]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _is_diffusion_decoder(names: object) -> bool:
    return any(str(n).endswith(DIFFUSION_DECODER_KEY) for n in names)  # type: ignore[attr-defined]


def _diffusion_decoder(path: Path) -> str:
    return (
        f"{path} is the diffusion decoder (it holds {DIFFUSION_DECODER_KEY}), which is not "
        f"implemented; give the folder of the convolutional video VAE"
    )
