"""Parts of LTX that diffusers computes, from local folders in its own layout, loaded strictly.

A folder holds config.json and safetensors. No name is ever looked up anywhere else, and a file that
does not fit its class to the last tensor is refused before anything reaches the device.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.load import LoadReport
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.folders import CONFIG, LATENTS_MEAN, LATENTS_STD, Component, check_component

STATISTICS = (LATENTS_MEAN, LATENTS_STD)  # applied to fp32 latents: fp32 in every dtype
_LISTED = 5


def library(name: str) -> Any:
    """The module `name` of diffusers or transformers; Unavailable where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.split(".")[0]
        reason = f"{top} cannot be imported ({error}); install the extra with pip install '.[ltx]'"
        raise Unavailable("ltx components", reason) from error


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
    path: Path, component: Component, *, device: torch.device, dtype: torch.dtype
) -> tuple[Any, LoadReport]:
    """The component's class, built from its folder's config, in eval mode.

    CheckpointError: no such folder, another class, options that the installed class does not know,
    tensors missing, left over, of another shape or not finite.
    """
    began = time.perf_counter()
    folder, config, files = check_component(path, component)
    cls = getattr(library(component.module), component.class_name)
    _check_known(folder, config, cls)
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


def _check_known(folder: Path, config: Mapping[str, Any], cls: type) -> None:
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
