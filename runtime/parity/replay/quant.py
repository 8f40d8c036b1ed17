"""Replay of `quant` goldens: dequantisation, activation quantisers and linears of every format."""

from __future__ import annotations

from pathlib import Path

import comfy_kitchen as ck
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.checkpoints.base import LayerQuant, PackedWeight
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.dequant import dequantise
from runtime.kernels.linear.mxfp8_reference import dequantise_mxfp8
from runtime.kernels.linear.nvfp4_native import activation_scale, quantise
from runtime.parity.golden import Golden
from runtime.parity.metrics import Comparison, Unsupported, compare
from runtime.parity.setup import Setup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = {
    ("nvfp4", "dequant", ""): "nvfp4_dequant",
    ("nvfp4", "native", "exact"): "nvfp4_native",
    ("nvfp4", "native", "fallback"): "nvfp4_kitchen_fallback",
    ("float8_e4m3fn", "dequant", ""): "fp8_dequant",
    ("float8_e4m3fn", "native", ""): "fp8_native",
    ("int8_tensorwise", "", ""): "int8_convrot",
    ("int8_convrot", "", ""): "int8_convrot",
}


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Every derived tensor from the stored bytes; inputs (weight bytes, x, bias) are given."""
    del checkpoints, setup
    cases = sorted({tuple(name.split("/")[:2]) for name in golden.names if name.count("/") == 2})
    return [c for index, kind in cases for c in _Format(golden, index, kind).comparisons()]


class _Format:
    """One format of one shape."""

    def __init__(self, golden: Golden, index: str, kind: str) -> None:
        self.golden, self.kind, self.prefix = golden, kind, f"{index}/{kind}/"
        self.x, self.bias = golden.tensor(f"{index}/x"), golden.tensor(f"{index}/bias")
        rows, columns = golden.tensor(f"{index}/weight").shape
        self.shape = (rows, columns)

    def comparisons(self) -> list[Comparison]:
        out = []
        for name in sorted(n for n in self.golden.names if n.startswith(self.prefix)):
            words = name.removeprefix(self.prefix).split("_")
            if words[0] == "dequant":
                out.append(self._compare(name, self._dequantised(DTYPES[words[1]])))
            elif words[0] == "linear":
                out.append(self._compare(name, self._linear(words[1:])))
            elif words[0] == "x":
                out.append(self._compare(name, self._activation(words[1], DTYPES[words[2]])))
        return out

    def _compare(self, name: str, got: Tensor) -> Comparison:
        return compare(name, got, self.golden.tensor(name), run="staged", stage=self.kind)

    def _stored(self, suffix: str) -> Tensor | None:
        name = self.prefix + suffix
        return self.golden.tensor(name) if name in self.golden else None

    def _weight(self) -> Tensor:
        weight = self._stored("weight")
        if weight is not None:
            return weight
        return self.golden.tensor(self.prefix + "weight_u8").view(torch.float8_e4m3fn)

    def _packed(self, mode: str = "") -> PackedWeight:
        weight = self._weight()
        tensors: dict[str, Tensor] = {"weight": weight, "bias": self.bias}
        scale = self._stored("weight_scale")
        if scale is None:
            scale = self.golden.tensor(self.prefix + "weight_scale_u8").view(torch.float8_e4m3fn)
        tensors["weight_scale"] = scale
        second = self._stored("weight_scale_2")
        if second is not None:
            tensors["weight_scale_2"] = second
        if mode == "static":
            tensors["input_scale"] = torch.tensor(self._input_scale(), dtype=torch.float32)
        group = 0
        if self.kind == "int8_convrot":  # the largest rotation that divides the columns
            group = next(g for g in (256, 64, 16, 4) if self.shape[1] % g == 0)
        stored = "int8_tensorwise" if self.kind.startswith("int8") else self.kind
        return PackedWeight(
            layer=self.prefix.rstrip("/"),
            quant=LayerQuant(format=stored, convrot_group=group),
            shape=self.shape,
            tensors=tensors,
        )

    def _input_scale(self) -> float:
        return self.golden.params["input_scale"][self.kind]

    def _dequantised(self, dtype: torch.dtype) -> Tensor:
        if self.kind == "mxfp8":
            scales = self.golden.tensor(self.prefix + "weight_scale_u8")
            return dequantise_mxfp8(self._weight(), scales, dtype)
        return dequantise(self._packed(), dtype)

    def _linear(self, words: list[str]) -> Tensor:
        dtype = next(w for w in words if w in DTYPES)
        route = words[0] if words[0] in ("dequant", "native") else ""
        mode = next((w for w in words if w in ("dynamic", "static")), "")
        gemm = next((w for w in words if w in ("exact", "fallback")), "")
        x = self.x.to(DTYPES[dtype])
        if self.kind == "mxfp8":
            return F.linear(x, self._dequantised(x.dtype), self.bias.to(x.dtype))
        backend = BACKENDS.get((self.kind, route, gemm))
        if backend is None:
            raise Unsupported(f"linear {self.kind} {' '.join(words)}")
        module: nn.Module = linear_backend(backend).build(self._packed(mode))
        return module(x)

    def _activation(self, mode: str, dtype: torch.dtype) -> Tensor:
        x = self.x.to(dtype)
        stored = torch.tensor(self._input_scale()) if mode == "static" else None
        if self.kind == "nvfp4":
            scale = activation_scale(x, stored)
            codes, blocks = quantise(x, scale)
            rounded = ck.dequantize_nvfp4(codes, scale, blocks, dtype)
            return rounded[: x.shape[0], : x.shape[1]]
        if self.kind == "float8_e4m3fn":
            scale = torch.ones(()) if stored is None else stored
            codes = ck.quantize_per_tensor_fp8(x, scale, torch.float8_e4m3fn)
            return ck.dequantize_per_tensor_fp8(codes, scale, dtype)
        raise Unsupported(f"activation quantiser of {self.kind}")
