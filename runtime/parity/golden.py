"""The golden file formats: tensors plus a JSON header in the metadata (docs/goldens.md).

Those of H3 say their kind; those of LTX (metadata key `golden`) show it by what they store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from runtime.parity.ltx_kinds import kind_of


class Golden:
    """One golden case. Tensors are copied out of the mmap: MKL's results depend on alignment.

    `read` collects the names that were asked for. ValueError if the file is not a golden.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except Exception as error:  # safetensors raises its own untyped errors
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        self.names: frozenset[str] = frozenset(self._file.keys())
        self.header = _header(path, self._file.metadata() or {}, self.names)
        self.case: str = self.header["case"]
        self.kind: str = self.header["kind"]
        self.params: dict[str, Any] = self.header["params"]
        self.read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str) -> Tensor:
        """The stored tensor in its own allocation, stored dtype and shape."""
        self.read.add(name)
        return self._file.get_tensor(name).clone()


def _header(path: Path, metadata: dict[str, str], names: Iterable[str]) -> dict[str, Any]:
    key = "golden" if "golden" in metadata else "header"
    try:
        header = json.loads(metadata.get(key, "null"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a golden: its {key!r} is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a golden: its metadata has no {key!r} document")
    if key == "golden":
        header["kind"] = kind_of(names)
    for name, kind in (("case", str), ("kind", str), ("params", dict)):
        if not isinstance(header.get(name), kind):
            raise ValueError(f"{path} is not a golden: its header has no {name!r}")
    return header
