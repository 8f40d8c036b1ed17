"""Every attention backend on every device, over a few hundred rows."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.kernels.attention import (
    BACKENDS,
    AttentionBackend,
    AttentionOptions,
    attention_backend,
)
from runtime.probes.base import (
    Backend,
    Support,
    broken,
    random,
    relative_l2,
    tried,
    version_of,
)

HEADS, ROWS, WIDTH = 2, 333, 128  # odd rows: a kernel's tail counts


def backends(devices: tuple[torch.device, ...]) -> tuple[Backend, ...]:
    """In the order of BACKENDS."""
    return tuple(_backend(name, devices) for name in BACKENDS)


def _backend(name: str, devices: tuple[torch.device, ...]) -> Backend:
    try:
        backend = attention_backend(name)
    except Exception as error:  # its file imports a package that is broken
        return broken(name, "attention", error, devices)
    return Backend(
        name=name,
        field="attention",
        package=backend.package,
        version=version_of(backend.package),
        requirement=backend.requirement,
        takes=tuple(str(dtype).removeprefix("torch.") for dtype in backend.dtypes),
        devices=tuple(_on(backend, device) for device in devices),
    )


def _on(backend: AttentionBackend, device: torch.device) -> Support:
    options = AttentionOptions()

    def trial() -> float:
        attend = backend.load(device, options)
        half = torch.bfloat16 in backend.dtypes
        dtype = torch.bfloat16 if half else backend.dtypes[0]
        rows = -(-ROWS // backend.rows_multiple) * backend.rows_multiple
        made = random(3, rows, HEADS, WIDTH, device=device).to(dtype)
        q, k, v = (x[None].transpose(1, 2) for x in made)  # as the model hands them over
        return relative_l2(attend(q, k, v), _exact(q, k, v))

    return tried(device, lambda: backend.route(device, options), trial)


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * WIDTH**-0.5
    return (scores.softmax(-1) @ v.float()).transpose(1, 2).flatten(2)
