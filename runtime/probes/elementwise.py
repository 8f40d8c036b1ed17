"""Every form of the elementwise steps on every device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runtime.kernels.elementwise import BACKENDS, Elementwise, ElementwiseBackend
from runtime.kernels.elementwise import elementwise_backend as backend_of
from runtime.kernels.elementwise.eager import Eager
from runtime.kernels.rope import rope_table
from runtime.probes.base import Backend, Support, random, relative_l2, tried, version_of

ROWS, HEADS, WIDTH, PAIRS, EPS = 33, 2, 128, 48, 1e-5
SPANS = ((0, 9, 1), (9, ROWS, 0))


def backends(devices: tuple[torch.device, ...]) -> tuple[Backend, ...]:
    """In the order of BACKENDS."""
    return tuple(
        Backend(
            name=backend.name,
            field="elementwise",
            package=backend.package,
            version=version_of(backend.package),
            requirement=backend.requirement,
            takes=("float32", "bfloat16"),
            devices=tuple(_on(backend, device) for device in devices),
        )
        for backend in map(backend_of, BACKENDS)
    )


def _on(backend: ElementwiseBackend, device: torch.device) -> Support:
    def trial() -> float:
        ops = backend.load(device)
        given = [random(ROWS, 3 * HEADS * WIDTH, device=device) for _ in range(3)]
        want = steps(Eager(), *given)
        got = steps(ops, *(t.to(torch.bfloat16) for t in given))
        return max(map(relative_l2, got, want))

    return tried(device, lambda: backend.route(device), trial)


def steps(ops: Elementwise, x_SD: Tensor, o_SD: Tensor, qkv_SD: Tensor) -> list[Tensor]:
    """Every step once, in the dtype of x."""
    norm = nn.RMSNorm(x_SD.shape[1], eps=EPS, device=x_SD.device, dtype=x_SD.dtype)
    tables = o_SD[:2]
    y_SD = ops.norm_modulate(norm, x_SD, tables, tables, SPANS)
    total_SD = ops.gated_add(x_SD.clone(), o_SD, tables, SPANS)
    both_SD = x_SD.clone()
    normed_SD = ops.gated_add_norm(both_SD, o_SD, tables, norm, tables, tables, SPANS)
    heads = qkv_SD.clone().unflatten(1, (3, HEADS, WIDTH))
    q, k, _ = heads.unbind(1)  # views of one buffer, as the model has them
    angles = o_SD[:, :PAIRS].float()
    weight = x_SD[0, :WIDTH]
    ops.rms_rope(q, k, rope_table(angles, x_SD.dtype), weight, weight, EPS)
    v_SHd = torch.empty_like(q, memory_format=torch.contiguous_format)
    ops.copy(v_SHd, heads[:, 2])
    return [y_SD, total_SD, both_SD, normed_SD, ops.swiglu(o_SD), q, k, v_SHd]
