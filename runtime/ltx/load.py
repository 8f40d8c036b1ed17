"""LTX denoiser files to modules on a device, strictly (ltx25.md 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from runtime.checkpoints.base import PackedWeight
from runtime.checkpoints.file import IndexedCheckpoint, Source
from runtime.checkpoints.header import CheckpointError, read_header
from runtime.checkpoints.load import LoadProgress, LoadReport, load_into
from runtime.checkpoints.reader import Reader
from runtime.kernels.attention.base import Attend
from runtime.ltx.census import ROLE, Census, read_census
from runtime.ltx.forms import MODEL, Form
from runtime.ltx.linears import choose, in_published_order
from runtime.ltx.model import LTXModel
from runtime.ltx.orders import AUTO, known_order
from runtime.ltx.published import CONNECTORS
from runtime.ltx.text import Connectors

Tables = Literal["fp32", "comfy"]
TABLES: tuple[Tables, ...] = ("fp32", "comfy")
_E4M3_NAN = 127  # its code; those above are of negative numbers


class LTXCheckpoint(IndexedCheckpoint):
    """An open denoiser file (runtime/checkpoints/base.py); `census` is what its header says.

    Packed layers come out with high nibbles first and tiled scales, whatever `order` they had.
    """

    def __init__(self, census: Census, source: Source, order: str) -> None:
        super().__init__(census.index, ROLE, source)
        self.census = census
        self.order = order

    def packed(self, layer: str, device: torch.device | str = "cpu") -> PackedWeight:
        packed = super().packed(layer, device)
        _check_scales(packed)
        return in_published_order(packed, self.order)


def open_denoiser(path: Path, order: str = AUTO) -> LTXCheckpoint:
    """Reads the header only. order: of nibbles and scales (orders.py) where no marker says it.

    CheckpointError for a file that is broken, of another model, without config, of a version we do
    not run, with tensors missing, left over or misshapen, or of an order that is not known.
    """
    census = read_census(read_header(path))
    census.check()
    return LTXCheckpoint(census, Reader(path), known_order(census, order))


def load_denoiser(
    checkpoint: LTXCheckpoint,
    attend: Attend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    nvfp4: str = "nvfp4_dequant",
    tables: Tables = "fp32",
    cached: bool = False,
    form: Form = MODEL,
    progress: LoadProgress | None = None,
) -> tuple[LTXModel, LoadReport]:
    """The denoiser on the device, ready to run; the connectors of the file are left unread.

    dtype: of all that is not quantised. nvfp4, cached: as linears.choose takes them. tables: F32
    AdaLN tables stay F32, or "comfy": rounded to dtype, as ComfyUI loads them (1.5). form: the
    order of rounding. Unavailable or ValueError before anything is read when a choice cannot run;
    CheckpointError for a tensor with NaN or infinity.
    """
    if tables not in TABLES:
        raise ValueError(f"tables must be {' or '.join(TABLES)}, got {tables!r}")
    shapes = checkpoint.census.index.shapes
    build = choose(checkpoint.layers, shapes, nvfp4, device, dtype, cached=cached)
    with torch.device("meta"):
        keyframes = checkpoint.census.keyframes
        model = LTXModel(checkpoint.census.config, attend, keyframes=keyframes, form=form)

    def dtype_of(name: str, stored: torch.dtype) -> torch.dtype:
        kept = tables == "fp32" and "scale_shift_table" in name and stored == torch.float32
        return torch.float32 if kept else dtype

    report = load_into(
        model,
        checkpoint,
        device=device,
        dtype_of=dtype_of,
        build_linear=build,
        ignore=_connector_names(checkpoint, inside=True),
        progress=progress,
    )
    return model.eval().requires_grad_(False), report


def load_connectors(
    checkpoint: LTXCheckpoint,
    attend: Attend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    form: Form = MODEL,
) -> Connectors:
    """The connectors of the text conditioning, which the denoiser's file carries.

    CheckpointError when it has none, and as of load_denoiser.
    """
    census = checkpoint.census
    census.check_connectors()
    with torch.device("meta"):
        connectors = Connectors(census.config, attend, form=form)
    load_into(
        connectors,
        checkpoint,
        device=device,
        dtype_of=lambda name, stored: dtype,
        build_linear=choose(checkpoint.layers, census.index.shapes, "nvfp4_dequant", device, dtype),
        ignore=_connector_names(checkpoint, inside=False),
    )
    return connectors.eval().requires_grad_(False)


def _check_scales(packed: PackedWeight) -> None:
    """What the loader's look at floats leaves out: FP8 has no reduction, and 0 is finite."""
    layer, tensors = packed.layer, packed.tensors
    if int(tensors["weight_scale"].view(torch.uint8).max()) >= _E4M3_NAN:
        raise CheckpointError(
            f"{layer}.weight_scale holds NaN or negative scales; the file is damaged"
        )
    scale = float(tensors["input_scale"])
    if scale <= 0:
        raise CheckpointError(
            f"{layer}.input_scale is {scale:g}, which no activation can be divided by; it must be "
            f"above 0"
        )


def _connector_names(checkpoint: LTXCheckpoint, *, inside: bool) -> frozenset[str]:
    names = checkpoint.names()
    return frozenset(name for name in names if name.startswith(CONNECTORS) is inside)
