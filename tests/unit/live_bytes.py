"""Counts the bytes of tensors that live at once, also on torch's meta device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes alive at once of what was made inside the block."""

    def __init__(self, ignore: list[Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: dict[int, Any] = {}
        self._old = {tensor.untyped_storage()._cdata for tensor in ignore}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._old:
            return

        def gone(_: Any) -> None:
            self._live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)


def peak_bytes(run: Callable[[], object], *ignore: Tensor) -> int:
    """Of `run`; tensors to ignore existed before it (weights and inputs)."""
    with torch.inference_mode(), LiveBytes(list(ignore)) as counted:
        run()
    return counted.peak
