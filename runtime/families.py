"""Model families by name: one line per family, imported on demand by a rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FAMILIES: Mapping[str, str] = MappingProxyType(
    {"h3": "runtime.h3.pipeline", "ltx": "runtime.ltx.pipeline"}
)
