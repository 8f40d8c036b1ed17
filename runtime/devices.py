"""What PyTorch sees of the GPUs, as JSON: `python -m runtime.devices`, for processes without it."""

from __future__ import annotations

import json
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """{torch, cuda, reason, devices: [{name, compute, memory_bytes, uuid}]} in CUDA's order.

    Each device has added two numbers; `reason` says why there is none.
    """
    told: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "reason": "",
        "devices": [],
    }
    try:
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            assert (torch.ones(1, device=f"cuda:{index}") + 1).item() == 2
            told["devices"].append(
                {
                    "name": facts.name,
                    "compute": f"{facts.major}.{facts.minor}",
                    "memory_bytes": facts.total_memory,
                    "uuid": f"GPU-{facts.uuid}",
                }
            )
    except RuntimeError as error:  # CUDA's own words: driver too old, no kernel for this GPU
        told["reason"] = str(error).splitlines()[0]
    if not told["devices"] and not told["reason"]:
        built = f"built for CUDA {told['cuda']}" if told["cuda"] else "built without CUDA"
        told["reason"] = f"torch {told['torch']} ({built}) finds no GPU"
    return told


if __name__ == "__main__":
    print(json.dumps(describe()))
