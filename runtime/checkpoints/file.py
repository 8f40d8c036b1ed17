"""An open checkpoint: tensors are read on request into allocations of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.checkpoints import FORMATS
from runtime.checkpoints.base import PackedWeight
from runtime.checkpoints.header import CheckpointError, Header, TensorInfo, read_header
from runtime.checkpoints.index import Index, build_index
from runtime.checkpoints.layer import LayerQuant
from runtime.checkpoints.reader import Reader

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Source(Protocol):
    """Where the bytes come from: a file, or a generator of random weights."""

    def read(self, start: int, nbytes: int, device: torch.device) -> Tensor:
        """Bytes [start, start + nbytes) of the file as a uint8 vector of its own on `device`."""


class IndexedCheckpoint:
    """The Checkpoint protocol (base.py) over a checked index and a source of bytes."""

    def __init__(self, index: Index, role: str, source: Source) -> None:
        self.header: Header = index.header
        self.role = role
        self.layers: Mapping[str, LayerQuant] = index.layers
        self.quantised = bool(index.layers)
        self.metadata: Mapping[str, str] = index.header.metadata
        self._index = index
        self._source = source

    def names(self) -> tuple[str, ...]:
        return tuple(self._index.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._torch_dtype(name, self._info(name))

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        info = self._info(name)
        dtype = self._torch_dtype(name, info)
        data = self._source.read(info.start, info.nbytes, torch.device(device))
        return data.view(dtype).view(info.shape)

    def packed(self, layer: str, device: torch.device | str = "cpu") -> PackedWeight:
        quant = self.layers.get(layer)
        if quant is None:
            raise CheckpointError(f"{self.header.path}: {layer} is not a quantised layer")
        views = FORMATS[quant.format].views
        tensors = {}
        for suffix in self._index.suffixes(layer):
            tensor = self.tensor(f"{layer}.{suffix}", device)
            if tensor.dtype == torch.uint8 and suffix in views:
                tensor = tensor.view(TORCH_DTYPES[views[suffix][quant.format]])
            tensors[suffix] = tensor
        return PackedWeight(
            layer=layer, quant=quant, shape=self._index.shapes[layer], tensors=tensors
        )

    def logical_shape(self, layer: str) -> tuple[int, int]:
        """[N out, K in] of a quantised layer, known without reading it."""
        return self._index.shapes[layer]

    def _info(self, name: str) -> TensorInfo:
        info = self._index.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.header.path} has no tensor {name}")
        return info

    def _torch_dtype(self, name: str, info: TensorInfo) -> torch.dtype:
        dtype = TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.header.path}: {name} is {info.dtype}, not supported")
        return dtype


def open_file(path: Path, role: str) -> IndexedCheckpoint:
    """Open one safetensors file; header, prefix and markers are checked, tensors are not read."""
    return IndexedCheckpoint(build_index(read_header(path), role), role, Reader(path))
