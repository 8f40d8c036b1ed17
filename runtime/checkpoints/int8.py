"""INT8 layers with a scale per row or tensor, plain or ConvRot-rotated in groups (contract 8.6)."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.layer import FLOATS, Format, LayerQuant, LayerTensors


def _group(layer: str, marker: Mapping[str, Any]) -> int:
    rotated, group = marker.get("convrot", False), marker.get("convrot_groupsize")
    if not isinstance(rotated, bool):
        raise CheckpointError(f"layer {layer}: convrot must be true or false, got {rotated!r}")
    if not rotated:
        return 0
    if type(group) is not int or group < 4 or 4 ** round(log(group, 4)) != group:
        raise CheckpointError(
            f"layer {layer}: convrot_groupsize must be a power of 4 (published files: 256), "
            f"got {group!r}"
        )
    return group


def _check(tensors: LayerTensors, quant: LayerQuant) -> tuple[int, int]:
    rows, columns = tensors.matrix(("I8",))
    tensors.need("weight_scale", ("F32",))
    tensors.check("weight_scale", ("F32",), (rows, 1), (), (1,))
    tensors.check("bias", FLOATS, (rows,))
    if quant.convrot_group and columns % quant.convrot_group:
        raise CheckpointError(
            f"{tensors.layer}.weight has {columns} columns, not a multiple of its rotation group "
            f"{quant.convrot_group}"
        )
    return rows, columns


FORMAT = Format(
    markers=("int8_tensorwise",),
    options=frozenset({"convrot", "convrot_groupsize"}),
    required=("weight", "weight_scale"),
    optional=("bias",),
    group=_group,
    check=_check,
    views={},
)
