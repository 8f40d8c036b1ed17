"""Every in-process test runs on the CPU code paths the goldens were captured on, one thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.packed_files import unpack_demo
from runtime.parity.cpu import pin

CPU_PATHS = pin()  # here, because it must come before the first test module imports torch
unpack_demo()


@pytest.fixture(scope="session")
def cpu_paths() -> str:
    """ "pinned", or "unpinned: <reason>" where goldens can only be met within tolerances."""
    return CPU_PATHS


@pytest.fixture(scope="session")
def tiny_checkpoints() -> Path:
    """The goldens' checkpoints, rebuilt once beside tests/goldens."""
    from runtime.parity.tiny_checkpoints import build_checkpoints
    from tests.tiny_checkpoints import CHECKPOINTS

    return build_checkpoints(CHECKPOINTS)


@pytest.fixture(scope="session")
def ltx_goldens() -> Path:
    """The goldens of LTX, unpacked once in tests/goldens_ltx, with their checkpoints."""
    from tests.tiny_checkpoints import build_ltx

    return build_ltx()
