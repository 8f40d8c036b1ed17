"""What one GPU test leaves behind does not reach the next: its modes, and its module's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def synchronisation_allowed() -> Iterator[None]:
    """In "error" mode, left by a test that failed, every later test would fail as well."""
    yield
    if torch.cuda.is_available() and torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True, scope="module")
def memory_given_back() -> Iterator[None]:
    """A module begins with the whole GPU's memory."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
