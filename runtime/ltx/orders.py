"""In which order a file packs its NVFP4 nibbles and scales: shapes do not show it (ltx25.md 1.4).

The published file has element 2j in the high nibble and its scales tiled 128x4. Other writers
(ModelOpt, llm-compressor) give the same shapes, low nibbles first and scales row by row. Only
correlation with an unquantised copy tells them apart: the largest value of a layer is the same in
every reading. Free of torch. N output features, K input features, J = K / 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.header import CheckpointError, Header, TensorInfo, read_bytes, read_header
from runtime.checkpoints.roles import own_names
from runtime.ltx.census import ROLE, Census, read_census
from runtime.messages import LTX_NVFP4_ORDERS

ORDERS = LTX_NVFP4_ORDERS
PUBLISHED = ORDERS[0]
AUTO = "auto"  # the published order where markers or the whole census vouch for it
# The right reading of the published file has 0.9956 and a relative RMS error of 9.5 %, wrong ones
# at most 0.26 (VLC); of weights without any structure a wrong one still reached 0.94.
LEAST_CORRELATION = 0.985
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LEAST_STRUCTURE = 0.04
_LAYERS_READ = 3
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One order against the unquantised copy, the worst of the layers that were read."""

    order: str
    correlation: float
    relative_rms: float  # of the difference, to the copy's RMS


def known_order(census: Census, order: str) -> str:
    """The order to read `census` in, given what the user says: AUTO or one of ORDERS.

    CheckpointError where AUTO is not enough and where markers contradict the user; ValueError for
    another word.
    """
    if order not in (AUTO, *ORDERS):
        raise ValueError(f"ltx_nvfp4_order must be {AUTO} or {', '.join(ORDERS)}, got {order!r}")
    path, layers = census.header.path, len(census.index.layers)
    if census.markers != "none" and order not in (AUTO, PUBLISHED):
        raise CheckpointError(
            f"{path} has markers, which mean {PUBLISHED}, and ltx_nvfp4_order is {order}; set it "
            f"to {AUTO}"
        )
    if order != AUTO:
        return order
    if layers and census.markers == "none" and not census.official:
        raise CheckpointError(
            f"{path} has {layers} NVFP4 layers in {census.packed_blocks} blocks without markers, "
            f"and the published file has 1,176 in 42, so the order of nibbles and scales is not "
            f"known: compare it with a bf16 copy (inspect --against FILE) or set ltx_nvfp4_order "
            f"to one of {', '.join(ORDERS)}"
        )
    return PUBLISHED


def problem_of(header: Header, order: str) -> str:
    """Why no prompt could be run with the file of this header, "" if one can."""
    try:
        census = read_census(header)
        census.check()
        census.check_connectors()
        known_order(census, order)
    except CheckpointError as error:
        return str(error)
    return ""


def detected(readings: tuple[Reading, ...]) -> str:
    """The one order that fits the copy; "" when none or more than one does."""
    fitting = [r.order for r in readings if r.correlation >= LEAST_CORRELATION]
    return fitting[0] if len(fitting) == 1 else ""


def readings(census: Census, copy: Path) -> tuple[Reading, ...]:
    """Every order of `census` against an unquantised copy of the same model.

    Reads three layers of each file. CheckpointError when there is nothing to compare.
    """
    header = census.header
    layers = sorted(census.index.layers)
    if not layers:
        raise CheckpointError(f"{header.path} has no NVFP4 layer, whose order could be in question")
    other = read_header(copy)
    names = own_names(other.tensors.keys(), ROLE, copy)
    worst: dict[str, tuple[float, float]] = {}
    for layer in _picked(layers):
        name = f"{layer}.weight"
        shape = census.index.shapes[layer]
        info = other.tensors.get(names.get(name, ""))
        if info is None or info.shape != shape or info.dtype not in ("BF16", "F16", "F32"):
            raise CheckpointError(
                f"{copy} has no unquantised {name} of shape {list(shape)}, which {header.path} "
                f"could be compared with"
            )
        wanted = _floats(other, info)
        for order in ORDERS:
            got = _reading(census, layer, order)
            pair = _correlation(got, wanted), _relative_rms(got, wanted)
            known = worst.get(order, pair)
            worst[order] = min(known[0], pair[0]), max(known[1], pair[1])
    return tuple(
        Reading(order=order, correlation=worst[order][0], relative_rms=worst[order][1])
        for order in ORDERS
    )


def _picked(layers: list[str]) -> list[str]:
    return layers[:: max(1, len(layers) // _LAYERS_READ)][:_LAYERS_READ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStructure:
    """How much of the spread of the log scales rows and columns explain, 0 to 1, read both ways.

    Rows of trained weights differ in size, which a wrong order scatters: of 8 trained matrices of
    two small models the right order explained 0.30 to 0.73 and the wrong one 0.08 to 0.43 less; of
    random ones both explain the same. A hint without a copy, measured on no LTX file, so nothing is
    decided by it. Of the nibbles it says nothing: their order swaps whole columns.
    """

    tiled: float
    linear: float

    @property
    def points_to(self) -> str:
        """tiled | linear | "" where the two are too close."""
        if abs(self.tiled - self.linear) < LEAST_STRUCTURE:
            return ""
        return "tiled" if self.tiled > self.linear else "linear"


def scale_structure(census: Census) -> ScaleStructure | None:
    """The mean of three layers that fill their tiles, None without any: padding misleads."""
    index = census.index
    layers = [
        layer
        for layer, (rows, columns) in sorted(index.shapes.items())
        if index.tensors[f"{layer}.weight_scale"].shape == (rows, columns // 16)
    ]
    if not layers:
        return None
    picked = _picked(layers)
    tiled, linear = (
        float(np.mean([_explained(_scales(census, layer, order)) for layer in picked]))
        for order in ("high_tiled", "high_linear")
    )
    return ScaleStructure(tiled=tiled, linear=linear)


def _explained(scales_NJ: Matrix) -> float:
    logs = np.log(np.maximum(scales_NJ, 2**-9).astype(np.float64))  # the least E4M3 above 0
    whole = np.square(logs - logs.mean()).sum()
    fit = logs.mean(axis=1, keepdims=True) + logs.mean(axis=0, keepdims=True) - logs.mean()
    return float(1 - np.square(logs - fit).sum() / whole) if whole else 0.0


def _reading(census: Census, layer: str, order: str) -> Matrix:
    """The weight [N, K] as this order reads it."""
    header, tensors = census.header, census.index.tensors
    rows, columns = census.index.shapes[layer]
    scales_NJ = _scales(census, layer, order)
    packed = np.frombuffer(read_bytes(header, tensors[f"{layer}.weight"]), np.uint8)
    halves = [packed >> 4, packed & 15]
    if order.startswith("low"):
        halves.reverse()
    values_NJb = _E2M1[np.stack(halves, axis=-1)].reshape(rows, columns // 16, 16)
    second = np.frombuffer(read_bytes(header, tensors[f"{layer}.weight_scale_2"]), np.float32)
    return (values_NJb * (scales_NJ * second)[:, :, None]).reshape(rows, columns)


def _scales(census: Census, layer: str, order: str) -> Matrix:
    """The block scales [N, J] as this order reads them."""
    rows, columns = census.index.shapes[layer]
    info = census.index.tensors[f"{layer}.weight_scale"]
    stored = _e4m3(np.frombuffer(read_bytes(census.header, info), np.uint8))
    if order.endswith("tiled"):
        tiles = stored.reshape(info.shape[0] // 128, info.shape[1] // 4, 32, 4, 4)
        stored = tiles.transpose(0, 3, 2, 1, 4)
    return stored.reshape(info.shape)[:rows, : columns // 16]


def _e4m3(codes: NDArray[np.uint8]) -> Matrix:
    """E4M3 bytes as numbers; scales are not negative and not NaN."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    table = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6)) * np.where(bits > 127, -1, 1)
    return table.astype(np.float32)[codes]


def _floats(header: Header, info: TensorInfo) -> Matrix:
    raw = read_bytes(header, info)
    if info.dtype == "BF16":
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(info.shape)
    kind = np.float16 if info.dtype == "F16" else np.float32
    return np.frombuffer(raw, kind).astype(np.float32).reshape(info.shape)


def _correlation(got: Matrix, wanted: Matrix) -> float:
    a, b = got.ravel().astype(np.float64), wanted.ravel().astype(np.float64)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0


def _relative_rms(got: Matrix, wanted: Matrix) -> float:
    wide = wanted.astype(np.float64)
    norm = float(np.sqrt(np.square(wide).mean()))
    return float(np.sqrt(np.square(got - wide).mean())) / norm if norm else float("inf")
