"""Every in-process test runs on the CPU code paths the goldens were captured on, one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def ltx_components(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of everything around a tiny LTX denoiser (tiny_components.ComponentFolders)."""
    from runtime.ltx.demo import random_denoiser
    from runtime.ltx.tiny_components import write_tiny_components

    census = random_denoiser("tiny", "bf16").census
    folder = tmp_path_factory.mktemp("ltx")
    return write_tiny_components(folder, census.config, gemma_version=census.gemma_version)
