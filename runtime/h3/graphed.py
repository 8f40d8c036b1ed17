"""The denoiser's evaluation as CUDA graphs: what of it is an operand, and what is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from runtime.graphs import Graphs, Tensors
from runtime.h3.model import Block, H3Model, PackedInputs, StepRows
from runtime.h3.modulation import Tables


class GraphedForward:
    """H3Model.forward with its bits: embedding, blocks and final layer are one graph.

    The AdaLN tables are looked up (or built) outside it and copied into the graph's buffers with
    the rest: rows, text, rotation, conditions. Frozen into it are the spans and segments with all
    their lengths, which are therefore its key.
    """

    def __init__(self, model: H3Model, graphs: Graphs) -> None:
        self.graphs = graphs
        self._model = model

    def __call__(
        self, video_rows: Tensor, audio_rows: Tensor, inputs: PackedInputs, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """As H3Model.forward."""
        model = self._model
        tables = model.tables.at(rows.times_M, model)
        conditions = (inputs.condition_video, inputs.condition_audio)
        present = [t for t in conditions if t is not None]
        lengths = [len(layer) for layer in tables]
        operands = [
            video_rows,
            audio_rows,
            inputs.context_LD,
            inputs.rope,
            *present,
            *(table for layer in tables for table in layer),
        ]
        key = (
            inputs.segments,
            rows.spans,
            rows.video_time,
            rows.audio_time,
            tuple(t is not None for t in conditions),
            model.packed_rows.conditioning,
        )

        def evaluate(own: Sequence[Tensor]) -> Tensors:
            values = iter(own)
            video, audio, context, rope = (next(values) for _ in range(4))
            mine = replace(
                inputs,
                context_LD=context,
                rope=rope,
                condition_video=next(values) if inputs.condition_video is not None else None,
                condition_audio=next(values) if inputs.condition_audio is not None else None,
            )
            layers: Tables = [tuple(next(values) for _ in range(n)) for n in lengths]
            return model.evaluate(video, audio, mine, rows, layers)

        video, audio = self.graphs.run(key, evaluate, operands, self._held)
        return video, audio

    def _held(self) -> Sequence[Tensor]:
        """What the elementwise steps keep between calls, and would drop for other spans."""
        held: list[Tensor] = []
        for block in self._model.blocks:
            assert isinstance(block, Block)
            held += block.ops.kept()
        return held


def graphed(model: H3Model, graphs: Graphs) -> None:
    """From now on the model is evaluated as graphs."""
    module: nn.Module = model
    module.forward = GraphedForward(model, graphs)


def pool_bytes(model: H3Model) -> int:
    """Device memory of the model's graphs that no allocation counts; 0 without graphs."""
    forward = model.__dict__.get("forward")
    return forward.graphs.pool_bytes if isinstance(forward, GraphedForward) else 0


@contextmanager
def eagerly(model: H3Model) -> Iterator[None]:
    """The model is evaluated without graphs, which would call no hooks."""
    forward = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if forward is not None:
            model.__dict__["forward"] = forward
