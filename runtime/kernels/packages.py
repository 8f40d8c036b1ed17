"""Packages that backends bring in: imported only when a plan asks for them."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from runtime.kernels.unavailable import Unavailable

INT32_ELEMENTS = 2**31  # operands that kernels address with 32-bit element offsets


def installed(
    name: str, distribution: str, module: str, *, extra: str = ""
) -> tuple[ModuleType, str]:
    """(module, version) for the backend of that name; Unavailable if it cannot be imported.

    extra: of our own pyproject, which brings the distribution.
    """
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        what_to_do = f'; pip install -e ".[{extra}]"' if extra else ""
        raise Unavailable(name, f"{distribution} is not installed{what_to_do}") from error
    try:
        return importlib.import_module(module), version
    except Exception as error:  # a package that generates kernels may raise anything
        reason = f"{distribution} {version} cannot be imported ({type(error).__name__}: {error})"
        raise Unavailable(name, reason) from error


def function(name: str, module: ModuleType, wanted: str) -> Callable[..., Any]:
    """The function of an imported package; Unavailable, at load, where its build lacks it."""
    found: Callable[..., Any] | None = getattr(module, wanted, None)
    if found is None:
        raise Unavailable(
            name, f"this build of {module.__name__} has no {wanted}; install another version"
        )
    return found


def release(version: str) -> tuple[int, ...]:
    """(0, 2, 40) of "0.2.40+cu130"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def need_cuda(name: str, device: torch.device, known: tuple[tuple[int, int], ...]) -> None:
    """Unavailable unless this is a CUDA device of one of these compute capabilities."""
    if device.type != "cuda":
        raise Unavailable(name, f"it needs a CUDA device, got {device}")
    got = torch.cuda.get_device_capability(device)
    if got not in known:
        raise Unavailable(
            name,
            f"it has kernels for compute capability {capabilities(known)}, this GPU has "
            f"{capabilities((got,))}",
        )


def capabilities(known: tuple[tuple[int, int], ...]) -> str:
    """ "9.0, 10.0"."""
    return ", ".join(f"{major}.{minor}" for major, minor in known)


def need_correction_offsets(name: str, q_BHSd: Tensor, block: int) -> None:
    """Unavailable where FP4 attention's correction, S per block of queries, passes 32 bits."""
    tiles, heads, rows, _ = q_BHSd.shape
    blocks = -(-rows // block)
    if tiles * heads * blocks * blocks * block >= INT32_ELEMENTS:
        raise Unavailable(
            name, f"the correction of {rows} rows overflows 32-bit offsets; shorten the clip"
        )
