"""NVFP4 layers: two e2m1 values per byte, a tiled e4m3 scale per 16 columns (contract 8.3)."""

from __future__ import annotations

from runtime.checkpoints.header import CheckpointError
from runtime.checkpoints.layer import FLOATS, Format, LayerQuant, LayerTensors, round_up

_BLOCK = 16


def _check(tensors: LayerTensors, quant: LayerQuant) -> tuple[int, int]:
    rows, packed = tensors.matrix(("U8",))
    columns = 2 * packed
    if columns % _BLOCK:
        raise CheckpointError(
            f"{tensors.layer}.weight has {columns} columns; NVFP4 needs a multiple of {_BLOCK}"
        )
    scales = (round_up(rows, 128), round_up(columns // _BLOCK, 4))
    tensors.need("weight_scale", ("F8_E4M3", "U8"))
    tensors.check("weight_scale", ("F8_E4M3", "U8"), scales)
    tensors.need("weight_scale_2", ("F32",))
    tensors.check("weight_scale_2", ("F32",), (), (1,))
    tensors.check("input_scale", ("F32",), (), (1,))
    tensors.check("pre_quant_scale", FLOATS, (columns,))
    tensors.check("bias", FLOATS, (rows,))
    return rows, columns


FORMAT = Format(
    markers=("nvfp4",),
    required=("weight", "weight_scale", "weight_scale_2"),
    optional=("input_scale", "pre_quant_scale", "bias"),
    check=_check,
    views={"weight_scale": {"nvfp4": "F8_E4M3"}},
)
