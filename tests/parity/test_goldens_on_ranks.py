"""Goldens of whole requests, replayed free by ranks that share rows, heads or sides, on gloo.

Only the denoiser is shared here; the rest of a request runs on every rank. The last fp32 product
may add in another order over fewer rows, so a tensor after it is held to its limit, as on a GPU.
Ranks that share nothing but the sides compute each as one process does: bit-equal.
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
GUIDED = ["ref2va_1img_22f_cfg3_refneg_euler", "ref2va_1img_22f_cfg4_textneg"]


def replayed(mesh: Mesh, names: list[str], checkpoints: Path) -> dict[str, tuple[str, str, int]]:
    """By golden: its status, the first difference and how many tensors were compared."""
    found = {}
    for name in names:
        path = GOLDENS / f"{name}.safetensors"
        result = replay_case(path, checkpoints, PINNED, Setup(mesh=mesh))
        found[name] = (result.status, f"{result.first} {result.reason}", result.compared)
    return found


@pytest.mark.parametrize("layout", ["U2", "U4"])
def test_ranks_that_share_rows_meet_the_goldens(layout: str, tiny_checkpoints: Path) -> None:
    assert {"ref2va", "t2va", "fl2va", "guide"} == {
        Golden(GOLDENS / f"{name}.safetensors").params["mode"] for name in REQUESTS
    }
    for rank in on_ranks(replayed, layout, REQUESTS, tiny_checkpoints):
        for name, (status, first, compared) in rank.items():
            assert status in ("bit-equal", "pass"), (name, status, first)
            assert compared > 0
        assert len(rank) == len(REQUESTS)


@pytest.mark.parametrize(
    ("layout", "allowed"), [("CFG2", {"bit-equal"}), ("CFG2xU2", {"bit-equal", "pass"})]
)
def test_ranks_of_each_side_meet_the_guided_goldens(
    layout: str, allowed: set[str], tiny_checkpoints: Path
) -> None:
    """Whose sides have texts of different lengths, and one of them no reference."""
    for name in GUIDED:
        segments = Golden(GOLDENS / f"{name}.safetensors").header["layout"]
        lengths = {side: segments[side]["segments"][-1][1] for side in ("pos", "neg")}
        assert lengths["pos"] != lengths["neg"], name
    for rank in on_ranks(replayed, layout, GUIDED, tiny_checkpoints):
        assert list(rank) == GUIDED
        for name, (status, first, compared) in rank.items():
            print(layout, name, status, first, compared)
            assert status in allowed, (name, status, first)
            assert compared > 0
