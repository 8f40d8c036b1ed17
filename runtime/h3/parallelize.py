"""The denoiser on several ranks: which of its callables see a part of the rows, heads or weights.

Outside of this the model is single-device code. Every rank has the whole request, samples with the
same numbers and evaluates its own rows; only the velocities come back together. The text refiner
runs on every rank. S rows, R own rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from runtime.h3.model import Block, H3Model, PackedInputs, RowSpan, StepRows
from runtime.h3.modulation import Tables
from runtime.kernels.linear.packed import AmaxLinear
from runtime.meter import COMMUNICATION, StepMeter
from runtime.parallel.mesh import Exchange, Mesh
from runtime.parallel.shares import ranges, row_shares
from runtime.parallel.ulysses import RowShares, Ulysses, Wait


class OwnRows:
    """The pieces of H3Model.evaluate for one rank's rows: from all rows in, to all velocities out.

    It stands in their place on the model, so what wraps or calls them goes on as before.
    """

    def __init__(self, model: H3Model, mesh: Mesh, shared: RowShares, wait: Wait) -> None:
        self._model, self._group, self._shared, self._wait = model, mesh.rows, shared, wait

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
        return H3Model.run_blocks(self._model, x_RD, tables, mine, rope[:, own], start, stop)

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

    def _own(self, num_rows: int) -> slice:
        counts = row_shares(num_rows, self._group.size)
        self._shared.counts = counts
        return ranges(counts)[self._group.rank]


def share_rows(model: H3Model, mesh: Mesh, meter: StepMeter | None = None) -> None:
    """From now on the model evaluates this rank's rows, with attention over all of them.

    Called once its weights are there; `meter` measures how long exchanges are waited for.
    """
    if mesh.rows.size == 1:
        return
    wait: Wait = Exchange.wait
    if meter is not None:
        wait = meter.wrap(COMMUNICATION, wait)
    shared = RowShares()
    own = OwnRows(model, mesh, shared, wait)
    model.embed = own.embed  # type: ignore[method-assign]
    model.run_blocks = own.run_blocks  # type: ignore[method-assign]
    model.finish = own.finish  # type: ignore[method-assign]
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attn.attend = Ulysses(block.attn.attend, mesh.rows, shared, wait)


def share_amax(model: H3Model, mesh: Mesh, meter: StepMeter | None = None) -> None:
    """Activations that are scaled by their largest value get that of all ranks' rows and features.

    Then every rank quantises with the scale that one rank alone would have.
    """
    if mesh.everyone.size == 1:
        return
    share = mesh.everyone.maximum
    if meter is not None:
        share = meter.wrap(COMMUNICATION, share)
    for module in model.blocks.modules():  # the refiner has all its rows on every rank
        if isinstance(module, AmaxLinear):
            module.share_amax = share


def _within(own: slice, start: int, stop: int) -> tuple[int, int]:
    """Rows [start, stop) as far as they are own ones, counted from the first of those."""
    first = min(max(start, own.start), own.stop) - own.start
    last = min(max(stop, own.start), own.stop) - own.start
    return first, last


def _length(own: slice, start: int, stop: int) -> int:
    first, last = _within(own, start, stop)
    return last - first
