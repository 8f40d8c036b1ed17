"""What a probe tells of a backend, and how it is tried on a device."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.unavailable import Unavailable

# Relative L2: four bits stay below it on random numbers, a wrong kernel does not.
FAR_OFF = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One backend on one device."""

    device: str  # cpu, cuda:0 ...
    available: bool
    reason: str = ""  # why it cannot run
    route: str = ""  # the kernel that will run, with its version
    deviation: float | None = None  # relative L2 of a small trial against fp32; None: not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One name that a plan can carry."""

    name: str
    field: str  # of Plan
    also: tuple[str, ...] = ()  # other fields of Plan that take it
    package: str
    version: str  # "" if it is not installed
    requirement: str
    takes: tuple[str, ...]  # dtypes of an attention, stored formats of a linear
    devices: tuple[Support, ...]


def broken(name: str, field: str, error: Exception, devices: tuple[torch.device, ...]) -> Backend:
    """A backend whose file cannot even be imported."""
    reason = f"its file cannot be imported: {reason_of(error)}"
    return Backend(
        name=name,
        field=field,
        package="",
        version="",
        requirement="",
        takes=(),
        devices=tuple(Support(device=str(d), available=False, reason=reason) for d in devices),
    )


def version_of(package: str) -> str:
    """The installed version, "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def tried(
    device: torch.device, route: Callable[[], str], trial: Callable[[], float | None]
) -> Support:
    """Runs `trial` (a deviation) on the device; whatever a package raises is the reason."""
    try:
        deviation = trial()
        kernel = route()
    except Exception as error:  # a broken package may raise anything, and the others are to be told
        return Support(device=str(device), available=False, reason=reason_of(error))
    if deviation is not None and not deviation <= FAR_OFF:  # also NaN
        off = "not finite" if math.isnan(deviation) else f"{deviation:.2g} off (relative L2)"
        reason = f"it ran ({kernel}), but its result is {off}"
        return Support(device=str(device), available=False, reason=reason)
    return Support(device=str(device), available=True, route=kernel, deviation=deviation)


def reason_of(error: Exception) -> str:
    """One line: a backend's own reason, else the type and the first line of the message."""
    if isinstance(error, Unavailable):
        return error.reason
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def relative_l2(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64."""
    difference = got.double() - want.double()
    return float(difference.norm() / want.double().norm())


def random(*shape: int, device: torch.device) -> Tensor:
    """Normal numbers, fp32, the same on every device."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator).to(device)
