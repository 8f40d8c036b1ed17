"""`python -m tests.tiny_checkpoints` fills tests/goldens/checkpoints, which git ignores."""

from __future__ import annotations

from pathlib import Path

from runtime.parity.tiny_checkpoints import build_checkpoints

CHECKPOINTS = Path(__file__).parent / "goldens" / "checkpoints"

if __name__ == "__main__":
    build_checkpoints(CHECKPOINTS)
