"""The golden file format (goldens/README.md): tensors plus a JSON header in the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class Golden:
    """One golden case. Tensors are copied out of the mmap: MKL's results depend on alignment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except Exception as error:  # safetensors raises its own untyped errors
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        metadata = self._file.metadata() or {}
        if "header" not in metadata:
            raise ValueError(f"{path} is not a golden: its metadata has no 'header'")
        self.header: dict[str, Any] = json.loads(metadata["header"])
        self.case: str = self.header["case"]
        self.kind: str = self.header["kind"]
        self.params: dict[str, Any] = self.header["params"]
        self.names: frozenset[str] = frozenset(self._file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str) -> Tensor:
        """The stored tensor in its own allocation, stored dtype and shape."""
        return self._file.get_tensor(name).clone()
