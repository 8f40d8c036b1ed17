"""The denoiser on several ranks: which of its callables see a part of the rows, heads or weights.

Outside of this the model is single-device code. Every rank has the whole request, samples with the
same numbers and evaluates its own rows; only the velocities come back together. The text refiner
runs on every rank. Where each side of guidance has ranks of its own, those of a side do all this
among themselves. S rows, R own rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from runtime.checkpoints.base import UNQUANTISED, LayerQuant, PackedWeight
from runtime.h3.gathered import gather_rows
from runtime.h3.linears import Linears, named, narrow_layers
from runtime.h3.model import Block, H3Model, PackedInputs, RowSpan, StepRows
from runtime.h3.modulation import Tables
from runtime.h3.overlap import QKVTurns, overlap
from runtime.kernels.linear import linear_backend
from runtime.kernels.linear.packed import AmaxLinear
from runtime.kernels.unavailable import Unavailable
from runtime.messages import Plan
from runtime.meter import COMMUNICATION, StepMeter
from runtime.parallel.mesh import Exchange, Mesh, Wait
from runtime.parallel.packed_rows import PackedGather, PackedReturn
from runtime.parallel.shares import RowShares, head_shares, ranges, row_shares, unit_shares
from runtime.parallel.tensor import PartialSum, inputs_of, outputs_of, repeated
from runtime.parallel.turns import EDGES, HALVES
from runtime.parallel.ulysses import Ulysses

FFN_UNITS = (128, 64, 32, 16)  # rows of a tile of packed scales; less for small models


class OwnRows:
    """The pieces of H3Model.evaluate for one rank's rows: from all rows in, to all velocities out.

    It stands in their place on the model, so what wraps or calls them goes on as before.
    """

    def __init__(
        self,
        model: H3Model,
        mesh: Mesh,
        shared: RowShares,
        wait: Wait,
        *,
        gathered: bool,
        split: Sequence[float],
    ) -> None:
        """gathered: Q and K are of all rows, and rotate by the table of all. split: row_shares'."""
        self._model, self._group, self._shared, self._wait = model, mesh.rows, shared, wait
        self._gathered, self._split = gathered, split

    def embed(self, video_rows: Tensor, audio_rows: Tensor, inputs: PackedInputs) -> Tensor:
        """H3Model.embed, then its own rows [R, D]: embedding all keeps the bits of the GEMM."""
        whole_SD = H3Model.embed(self._model, video_rows, audio_rows, inputs)
        return whole_SD[self._own(len(whole_SD))].clone()

    def run_blocks(
        self,
        x_RD: Tensor,
        tables: Tables,
        spans: Sequence[RowSpan],
        rope: Tensor,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """H3Model.run_blocks on this rank's rows; spans and rope are those of all rows."""
        own = self._own(rope.shape[1])
        mine = [RowSpan(*_within(own, s.start, s.stop), s.row) for s in spans]
        mine = [span for span in mine if span.start < span.stop]
        rope = rope if self._gathered else rope[:, own]
        return H3Model.run_blocks(self._model, x_RD, tables, mine, rope, start, stop)

    def finish(
        self, x_RD: Tensor, inputs: PackedInputs, rows: StepRows, tables: Tables
    ) -> tuple[Tensor, Tensor]:
        """H3Model.finish on this rank's target rows, then those of all ranks, on every rank."""
        own = self._own(inputs.segments[-1][1])
        (a0, a1, _), (v0, v1, _) = inputs.segments[-2:]
        local = tuple((*_within(own, a, b), kind) for a, b, kind in inputs.segments)
        video, audio = H3Model.finish(
            self._model, x_RD, replace(inputs, segments=local), rows, tables
        )
        everyone = ranges(self._shared.counts)
        sizes = [
            size
            for each in everyone
            for size in (
                _length(each, v0, v1) * video.shape[1],
                _length(each, a0, a1) * audio.shape[1],
            )
        ]
        totals = [v + a for v, a in zip(sizes[::2], sizes[1::2], strict=True)]
        packed = torch.cat([video.reshape(-1), audio.reshape(-1)])
        parts = self._wait(self._group.gather(packed, totals)).split(sizes)
        return (
            torch.cat(parts[::2]).view(-1, video.shape[1]),
            torch.cat(parts[1::2]).view(-1, audio.shape[1]),
        )

    @property
    def window_bytes(self) -> int:
        """Of what is received by copies."""
        return 0 if self._group.copies is None else self._group.copies.num_bytes

    def _own(self, num_rows: int) -> slice:
        counts = row_shares(num_rows, self._group.size, self._split)
        self._shared.counts = counts
        return ranges(counts)[self._group.rank]


def window_bytes(model: H3Model) -> int:
    """Device memory beside torch's allocator that the exchanges of its rows hold."""
    own = getattr(model.embed, "__self__", None)
    return own.window_bytes if isinstance(own, OwnRows) else 0


def share_rows(
    model: H3Model, mesh: Mesh, meter: StepMeter | None = None, split: Sequence[float] = ()
) -> None:
    """From now on the model evaluates this rank's rows, with attention over all of them.

    Called once its weights are there; `meter` measures how long exchanges are waited for. split: in
    which proportion the ranks share the rows (row_shares).
    """
    if mesh.rows.size == 1:
        return
    wait: Wait = Exchange.wait
    if meter is not None:
        wait = meter.wrap(COMMUNICATION, wait)
    shared, gathered = RowShares(), False
    for block in model.blocks:
        assert isinstance(block, Block)
        attn = block.attn
        gather = PackedGather(mesh.rows, shared, wait)
        back = PackedReturn(mesh.rows, shared, wait)
        gathered = gather_rows(attn, attn.attend, gather, back, mesh)
        if not gathered:
            overlapped = isinstance(attn.qkv_proj, QKVTurns)
            parts = EDGES if mesh.rows.copies is not None and not overlapped else HALVES
            ulysses = Ulysses(attn.attend, mesh.rows, shared, wait, parts, attn.ops.copy)
            attn.attend = ulysses
            if overlapped:
                overlap(attn, ulysses)
    own = OwnRows(model, mesh, shared, wait, gathered=gathered, split=split)
    model.embed = own.embed  # type: ignore[method-assign]
    model.run_blocks = own.run_blocks  # type: ignore[assignment,method-assign]
    model.finish = own.finish  # type: ignore[assignment,method-assign]


def share_weights(
    model: H3Model,
    layers: Mapping[str, LayerQuant],
    plan: Plan,
    linears: Linears,
    mesh: Mesh,
    meter: StepMeter | None = None,
) -> Linears:
    """What builds this rank's part of the blocks' linears; the blocks get its number of heads.

    qkv and fc1 are cut by outputs (heads; gate and up alike), out and fc2 by inputs. layers: the
    quantised ones of the file. Unavailable for a backend that cannot be cut, ValueError where heads
    or features do not go around.
    """
    names = narrow_layers(model)
    _check_cut(names, layers, plan)
    heads = ranges(head_shares(model.cfg.num_heads, mesh.weights.size))[mesh.weights.rank]
    width = model.cfg.head_dim
    inner = slice(heads.start * width, heads.stop * width)
    ffn = ranges(unit_shares(model.cfg.ffn, mesh.weights.size, FFN_UNITS))[mesh.weights.rank]
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.heads = heads.stop - heads.start
    total = mesh.weights.total
    if meter is not None:
        total = meter.wrap(COMMUNICATION, total)

    def build(packed: PackedWeight, replaced: nn.Module) -> nn.Module:
        if packed.layer not in names:
            return linears.build(packed, replaced)
        kind = packed.layer.rpartition(".")[2]
        if kind == "qkv_proj":
            parts = repeated(inner, 3, model.cfg.num_heads * width)
            return linears.build(outputs_of(packed, parts), replaced)
        if kind == "fc1":
            parts = repeated(ffn, 2, model.cfg.ffn)
            return linears.build(outputs_of(packed, parts), replaced)
        own = inputs_of(packed, inner if kind == "out_proj" else ffn)
        return PartialSum(linears.build(own, replaced), total)

    return Linears(build=build, converted=linears.converted)


def _check_cut(names: frozenset[str], layers: Mapping[str, LayerQuant], plan: Plan) -> None:
    for layer in sorted(names):
        quant = layers.get(layer, LayerQuant(format=UNQUANTISED))
        backend = linear_backend(named(plan)[quant.format])
        if backend.whole_inputs:
            raise Unavailable(
                f"layout {plan.layout}",
                f"{backend.name} of {layer} scales by whole rows and tensor parallel ranks have "
                f"parts of them; choose a layout without TP, or another backend",
            )


def share_amax(model: H3Model, mesh: Mesh, meter: StepMeter | None = None) -> None:
    """Activations that are scaled by their largest value get that of all ranks' rows and features.

    Then every rank quantises with the scale that one rank alone would have.
    """
    if mesh.evaluation.size == 1:
        return
    share = mesh.evaluation.maximum
    if meter is not None:
        share = meter.wrap(COMMUNICATION, share)
    for module in model.blocks.modules():  # the refiner has all its rows on every rank
        if isinstance(module, AmaxLinear):
            module.share_amax = share
    for module in model.blocks.modules():
        if isinstance(module, QKVTurns):
            module.share_amax(share)


def _within(own: slice, start: int, stop: int) -> tuple[int, int]:
    """Rows [start, stop) as far as they are own ones, counted from the first of those."""
    first = min(max(start, own.start), own.stop) - own.start
    last = min(max(stop, own.start), own.stop) - own.start
    return first, last


def _length(own: slice, start: int, stop: int) -> int:
    first, last = _within(own, start, stop)
    return last - first
