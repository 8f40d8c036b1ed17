"""Parts of LTX that diffusers computes, from local folders in its own layout, loaded strictly.

A folder holds config.json and safetensors. No name is ever looked up anywhere else, and a file that
does not fit its class to the last tensor is refused before anything reaches the device.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.load import LoadReport
from runtime.kernels.unavailable import Unavailable
from runtime.ltx.folders import (
    CONFIG,
    LATENTS_MEAN,
    LATENTS_STD,
    Component,
    check_component,
    shapes_of,
)
from runtime.quoted import cut

STATISTICS = (LATENTS_MEAN, LATENTS_STD)  # applied to fp32 latents: fp32 in every dtype
_LISTED = 5
_SAID = 300  # characters


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
    built = _built(folder, config, component, device)
    _check_tensors(built, files, folder)
    # diffusers' own `to` warns of an empty list of modules that should stay in float32
    built = nn.Module.to(built, dtype).eval().requires_grad_(False)
    for name in STATISTICS:
        if hasattr(built, name):
            setattr(built, name, getattr(built, name).float())
    tensors, own = read_tensors(files), built.state_dict()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(own[name].copy_(tensor)).all()):
            raise CheckpointError(f"{folder}: {name} holds NaN or infinity")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    return built, LoadReport(bytes=total, seconds=time.perf_counter() - began)


def check_fits(path: Path, component: Component) -> None:
    """CheckpointError as load_component, by config.json and headers alone: no number is read."""
    folder, config, files = check_component(path, component)
    _check_tensors(_built(folder, config, component, torch.device("meta")), files, folder)


def _built(
    folder: Path, config: Mapping[str, Any], component: Component, device: torch.device
) -> nn.Module:
    """The component's class as the config says, its tensors not read yet."""
    cls = getattr(library(component.module), component.class_name)
    _check_known(folder, config, cls)
    try:
        with torch.device(device):
            built: nn.Module = cls.from_config(config)
    except torch.OutOfMemoryError:  # which is no fault of the config
        raise
    except Exception as error:  # of whatever kind the class fails with
        raise CheckpointError(
            f"{folder / CONFIG} makes no {cls.__name__} ({type(error).__name__}: {said(error)})"
        ) from error
    return built


def _check_known(folder: Path, config: Mapping[str, Any], cls: type) -> None:
    known = set(inspect.signature(cls.__init__).parameters)  # type: ignore[misc]
    strange = sorted(k for k in config if not k.startswith("_") and k not in known)
    if strange:
        told = ", ".join(cut(k if k.isprintable() else repr(k)) for k in strange[:_LISTED])
        raise CheckpointError(
            f"{folder / CONFIG} has {told}, which the installed diffusers' "
            f"{cls.__name__} does not know; it was written by another version"
        )


def _check_tensors(module: nn.Module, files: Mapping[str, Path], folder: Path) -> None:
    """CheckpointError unless `files` (tensor_files) have the tensors of the module and no other."""
    found, own = shapes_of(files, files), module.state_dict()
    problems = [f"{name} is missing" for name in own if name not in found]
    for name, got in found.items():
        if name not in own:
            problems.append(f"{name} is left over")
        elif got != tuple(own[name].shape):
            problems.append(f"{name} is {list(got)}, expected {list(own[name].shape)}")
    refuse(problems, type(module).__name__, files, folder)


def said(error: Exception) -> str:
    """What an error of a library says, as a part of one sentence."""
    told = " ".join(str(error).split())[:_SAID]
    return told.encode(errors="backslashreplace").decode()  # half a character of a config


def refuse(problems: Sequence[str], what: str, files: Mapping[str, Path], folder: Path) -> None:
    """CheckpointError with the first problems, if there are any, naming the file if it is one."""
    if problems:
        more = len(problems) - _LISTED
        listed = [cut(problem, _SAID) for problem in problems[:_LISTED]]
        told = "; ".join(listed) + (f"; {more} more" if more > 0 else "")
        places = set(files.values())
        place = places.pop() if len(places) == 1 else folder
        raise CheckpointError(f"{place} does not fit {what}: {told}")
