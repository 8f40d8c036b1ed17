"""Goldens of whole requests, replayed free by ranks that share rows and heads, on gloo processes.

Only the denoiser is shared here; the rest of a request runs on every rank. The last fp32 product
may add in another order over fewer rows, so a tensor after it is held to its limit, as on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.parallel.mesh import Mesh
from runtime.parity.golden import Golden
from runtime.parity.judge import replay_case
from runtime.parity.setup import Setup
from tests.rank_processes import PINNED, on_ranks

HERE = Path(__file__).parent
GOLDENS = HERE.parent / "goldens"
NAMES: list[str] = json.loads((HERE / "expected.json").read_text())["names"]
REQUESTS = [n for n in NAMES if Golden(GOLDENS / f"{n}.safetensors").kind == "e2e"]


def replayed(mesh: Mesh, checkpoints: Path) -> dict[str, tuple[str, str, int]]:
    """By golden: its status, the first difference and how many tensors were compared."""
    found = {}
    for name in REQUESTS:
        path = GOLDENS / f"{name}.safetensors"
        result = replay_case(path, checkpoints, PINNED, Setup(mesh=mesh))
        found[name] = (result.status, f"{result.first} {result.reason}", result.compared)
    return found


@pytest.mark.parametrize("layout", ["U2", "U4"])
def test_ranks_that_share_rows_meet_the_goldens(layout: str, tiny_checkpoints: Path) -> None:
    assert {"ref2va", "t2va", "fl2va", "guide"} == {
        Golden(GOLDENS / f"{name}.safetensors").params["mode"] for name in REQUESTS
    }
    for rank in on_ranks(replayed, layout, tiny_checkpoints):
        for name, (status, first, compared) in rank.items():
            assert status in ("bit-equal", "pass"), (name, status, first)
            assert compared > 0
        assert len(rank) == len(REQUESTS)
