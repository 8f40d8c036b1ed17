"""What one quantised layer is: its marker, and the shape checks a format makes on it (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.checkpoints.header import CheckpointError, TensorInfo

FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerQuant:
    """The marker of one quantised layer (contract 8.1)."""

    format: str  # nvfp4 | float8_e4m3fn | float8_e5m2 | int8_tensorwise
    full_precision: bool = False  # full_precision_matrix_mult: dequantise, ordinary matmul
    convrot_group: int = 0  # 0: not rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """The stored tensors of one layer by suffix ("weight", "weight_scale" ...)."""

    layer: str
    infos: Mapping[str, TensorInfo]

    def need(self, suffix: str, dtypes: tuple[str, ...]) -> TensorInfo:
        """The tensor `layer.suffix`; raises CheckpointError when absent or of another dtype."""
        info = self.infos.get(suffix)
        if info is None:
            raise CheckpointError(f"layer {self.layer} has no {suffix}")
        self.check(suffix, dtypes)
        return info

    def check(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """If `layer.suffix` exists it must have one of these dtypes and (if given) shapes."""
        info = self.infos.get(suffix)
        if info is None:
            return
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"{self.layer}.{suffix} is {info.dtype}, it must be {' or '.join(dtypes)}"
            )
        if shapes and info.shape not in shapes:
            raise CheckpointError(
                f"{self.layer}.{suffix} has shape {list(info.shape)}, it must be "
                f"{' or '.join(str(list(shape)) for shape in shapes)}"
            )

    def matrix(self, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Stored [rows, columns] of the weight."""
        shape = self.need("weight", dtypes).shape
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.layer}.weight has shape {list(shape)}; a quantised weight has 2 dimensions"
            )
        return shape[0], shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One on-disk quantisation format."""

    markers: tuple[str, ...]  # values of "format" in the marker
    options: frozenset[str] = frozenset()  # marker keys besides format, full_precision_matrix_mult
    required: tuple[str, ...]
    optional: tuple[str, ...]
    group: Callable[[str, Mapping[str, Any]], int] = lambda layer, marker: 0  # rotation group
    check: Callable[[LayerTensors, LayerQuant], tuple[int, int]]  # returns the logical [N, K]
    views: Mapping[str, Mapping[str, str]]  # suffix -> marker format -> dtype that U8 bytes mean

    @property
    def suffixes(self) -> tuple[str, ...]:
        return self.required + self.optional


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
