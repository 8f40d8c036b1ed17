"""FP8 scaled layers: e4m3 or e5m2 weights with one scale per tensor (contract 8.4)."""

from __future__ import annotations

from runtime.checkpoints.layer import FLOATS, Format, LayerQuant, LayerTensors

_STORED = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def _check(tensors: LayerTensors, quant: LayerQuant) -> tuple[int, int]:
    rows, columns = tensors.matrix((_STORED[quant.format], "U8"))
    tensors.need("weight_scale", ("F32",))
    tensors.check("weight_scale", ("F32",), (), (1,))
    tensors.check("input_scale", ("F32",), (), (1,))
    tensors.check("bias", FLOATS, (rows,))
    return rows, columns


FORMAT = Format(
    markers=tuple(_STORED),
    required=("weight", "weight_scale"),
    optional=("input_scale", "bias"),
    check=_check,
    views={"weight": _STORED},
)
