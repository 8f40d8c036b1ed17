"""Both forms of the q/k norm and rotation on every device."""

from __future__ import annotations

import torch

from runtime.kernels.fused import RMS_ROPES, load_rms_rope, rms_rope_eager, rope_table
from runtime.probes.base import Backend, Support, random, relative_l2, tried, version_of

ROWS, HEADS, WIDTH, PAIRS, EPS = 33, 2, 128, 48, 1e-5
PACKAGES = {"eager": "torch", "kitchen": "comfy-kitchen"}


def backends(devices: tuple[torch.device, ...]) -> tuple[Backend, ...]:
    """In the order of RMS_ROPES."""
    return tuple(
        Backend(
            name=name,
            field="rms_rope",
            package=PACKAGES[name],
            version=version_of(PACKAGES[name]),
            requirement=requirement,
            takes=("float32", "bfloat16"),
            devices=tuple(_on(name, device) for device in devices),
        )
        for name, requirement in RMS_ROPES.items()
    )


def _on(name: str, device: torch.device) -> Support:
    def trial() -> float:
        run = load_rms_rope(name, device)
        # q and k are views of one buffer, as the model has them
        q, k, _ = random(ROWS, 3, HEADS, WIDTH, device=device).to(torch.bfloat16).unbind(1)
        table = rope_table(random(ROWS, PAIRS, device=device), torch.float32)
        weight = random(WIDTH, device=device)
        want_q, want_k = q.float(), k.float()
        rms_rope_eager(want_q, want_k, table, weight, weight, EPS)
        half = weight.to(torch.bfloat16)
        run(q, k, table.to(torch.bfloat16), half, half, EPS)
        return max(relative_l2(q, want_q), relative_l2(k, want_k))

    return tried(device, lambda: f"{PACKAGES[name]} {version_of(PACKAGES[name])}", trial)
