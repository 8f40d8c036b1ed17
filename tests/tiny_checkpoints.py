"""`python -m tests.tiny_checkpoints` fills what git ignores: checkpoints of the tiny goldens of H3,
goldens and checkpoints of LTX, which the checkout holds compressed."""

from __future__ import annotations

from pathlib import Path

from runtime.packed_files import unpack
from runtime.parity.tiny_checkpoints import build_checkpoints, build_ltx_checkpoints

CHECKPOINTS = Path(__file__).parent / "goldens" / "checkpoints"
LTX = Path(__file__).parent / "goldens_ltx"


def build_ltx(folder: Path = LTX) -> Path:
    """Fill `folder` (default: where they lie) with the goldens and `folder`/checkpoints."""
    unpack(LTX, folder)
    build_ltx_checkpoints(folder / "checkpoints")
    return folder


if __name__ == "__main__":
    build_checkpoints(CHECKPOINTS)
    build_ltx()
