"""Every linear backend on every device, over one layer of the demo model in its format."""

from __future__ import annotations

import torch

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.checkpoints.demo import random_checkpoint
from runtime.kernels.linear import BACKENDS, LinearBackend, linear_backend
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.unavailable import Unavailable
from runtime.probes.base import (
    Backend,
    Support,
    broken,
    random,
    relative_l2,
    tried,
    version_of,
)

ROWS = 33
LAYER = "blocks.0.mlp.fc1"  # unquantised
# stored format -> the demo denoiser that holds it, and the plan's field that names its backend
STORED = {
    UNQUANTISED: ("pruned_bf16", "dense"),
    "nvfp4": ("pruned_nvfp4", "nvfp4"),
    "float8_e4m3fn": ("full_fp8", "fp8"),
    "int8_tensorwise": ("pruned_int8", "int8"),
}


def backends(devices: tuple[torch.device, ...]) -> tuple[Backend, ...]:
    """In the order of BACKENDS."""
    return tuple(_backend(name, devices) for name in BACKENDS)


def _backend(name: str, devices: tuple[torch.device, ...]) -> Backend:
    try:
        backend = linear_backend(name)
    except Exception as error:  # its file imports a package that is broken
        return broken(name, "", error, devices)
    field, *also = [STORED[f][1] for f in backend.formats if f in STORED] or [""]
    return Backend(
        name=name,
        field=field,
        also=tuple(also),
        package=backend.package,
        version=version_of(backend.package),
        requirement=backend.requirement,
        takes=backend.formats,
        devices=tuple(_on(backend, device) for device in devices),
    )


def _on(backend: LinearBackend, device: torch.device) -> Support:
    def trial() -> float | None:
        if reason := backend.reason(device):
            raise Unavailable(backend.name, reason)
        stored = next((f for f in backend.formats if f in STORED), None)
        return None if stored is None else _deviation(backend, packed_layer(stored, device), device)

    return tried(device, lambda: backend.route(device), trial)


def packed_layer(stored: str, device: torch.device) -> PackedWeight:
    """A layer of the demo denoiser that holds this stored format (a key of STORED)."""
    checkpoint = random_checkpoint("dit", size="tiny", format=STORED[stored][0])
    if stored != UNQUANTISED:
        return checkpoint.packed(next(iter(checkpoint.layers)), device)
    weight = checkpoint.tensor(f"{LAYER}.weight", device)
    rows, columns = weight.shape
    return PackedWeight(
        layer=LAYER,
        quant=LayerQuant(format=UNQUANTISED),
        shape=(rows, columns),
        tensors={"weight": weight},
    )


def _deviation(backend: LinearBackend, packed: PackedWeight, device: torch.device) -> float:
    x = random(ROWS, packed.shape[1], device=device).to(torch.bfloat16)
    want = x.float() @ dequantise(packed, torch.float32).t()
    with torch.inference_mode():
        return relative_l2(backend.build(packed)(x), want)
