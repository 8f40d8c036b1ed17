"""The text encoder whose parts come to the device one after another, never all of them at once."""

from __future__ import annotations

import copy
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from runtime.checkpoints.base import Checkpoint
from runtime.checkpoints.load import LoadProgress, LoadReport, check_fits, fill
from runtime.h3.text import Grid, Sequence, TextEncoder, compute_dtype, used_names
from runtime.h3.text_layers import NUM_LAYERS
from runtime.h3.text_linear import build_packed
from runtime.messages import Plan

VISION, EMBEDDING = "visual", "model.embed_tokens"


class LayeredTextEncoder(TextEncoder):
    """The same bits from the same calls: a part is read when it is due and dropped after its use.

    The vision tower (if there are pictures), then the token table, then the layers: while one runs
    a thread reads the next, so that two lie on the device. Its constructor reads no weights, but
    refuses a file that does not fit; `progress`(layers run, layers in all) may raise to stop.
    """

    def _load(self, checkpoint: Checkpoint, progress: LoadProgress | None) -> LoadReport:
        began = time.perf_counter()
        self._checkpoint, self._progress = checkpoint, progress
        names = used_names(checkpoint)
        check_fits(self.modules, checkpoint, names)
        self._names: dict[str, list[str]] = {}
        for name in names:
            self._names.setdefault(_part(name), []).append(name)
        self._empty: dict[str, nn.Module] = {}
        return LoadReport(bytes=0, seconds=time.perf_counter() - began)

    @torch.no_grad()
    def look(self, patches_PE: Tensor, grid: Grid) -> tuple[Tensor, list[Tensor]]:
        """As TextEncoder; the vision tower stays until the tokens are embedded."""
        if VISION not in self._empty:
            self._fetch(VISION)
        return super().look(patches_PE, grid)

    @torch.no_grad()
    def embed(self, sequence: Sequence, merged: list[Tensor]) -> Tensor:
        """As TextEncoder; the token table is on the device for this call only."""
        self._drop(VISION)
        self._fetch(EMBEDDING)
        x = super().embed(sequence, merged)
        self._drop(EMBEDDING)
        return x

    def _ready(self, layers: range) -> Generator[int]:
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def fetch(index: int) -> None:
            # In the caller's stream: what it still computes with cannot be overwritten.
            with torch.cuda.stream(stream):
                self._fetch(_layer(index))

        try:
            with ThreadPoolExecutor(1) as thread:
                coming = thread.submit(fetch, layers[0])
                for index in layers:
                    coming.result()
                    if index + 1 in layers:
                        coming = thread.submit(fetch, index + 1)
                    yield index
                    self._drop(_layer(index))
                    if self._progress is not None:
                        self._progress(index + 1, NUM_LAYERS)
        finally:
            for part in tuple(self._empty):  # stopped between two layers
                self._drop(part)

    def _fetch(self, part: str) -> None:
        """Weights of the part, read onto the device."""
        self._empty[part] = empty = self.modules.get_submodule(part)
        self.modules.set_submodule(part, copy.deepcopy(empty))
        fill(
            self.modules,
            self._checkpoint,
            self._names[part],
            device=self.device,
            dtype_of=compute_dtype,
            build_linear=build_packed,
        )

    def _drop(self, part: str) -> None:
        """Only its shapes stay."""
        if part in self._empty:
            self.modules.set_submodule(part, self._empty.pop(part))


def encoder_of(plan: Plan) -> type[TextEncoder]:
    """The class for the plan's text_encoder: whole on the device, or a part at a time."""
    return LayeredTextEncoder if plan.text_encoder == "layers" else TextEncoder


def _layer(index: int) -> str:
    return f"model.layers.{index}"


def _part(name: str) -> str:
    """What a tensor is read together with: the vision tower, the token table or a layer."""
    if name.startswith(f"{VISION}."):
        return VISION
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else EMBEDDING
