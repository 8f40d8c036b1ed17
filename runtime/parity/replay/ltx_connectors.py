"""Replay of LTX text conditioning: features, projections, and the connectors in both forms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from runtime.ltx.attention import load_ltx_attention
from runtime.ltx.forms import COMFY, MODEL, Form
from runtime.ltx.load import load_connectors
from runtime.ltx.text import TextProjection, token_features
from runtime.parity.golden import Golden
from runtime.parity.ltx_files import open_named
from runtime.parity.metrics import Comparison, compare
from runtime.parity.setup import Setup

STREAMS = ("video", "audio")
PROJECTION = "text_embedding_projection."


def replay(golden: Golden, checkpoints: Path, setup: Setup) -> list[Comparison]:
    """Free from the tower's states; staged (CPU): the connectors from the stored projections."""
    case = _Text(golden, checkpoints, setup)
    return [*case.free(), *(case.staged() if setup.staged else ())]


class _Text:
    def __init__(self, golden: Golden, checkpoints: Path, setup: Setup) -> None:
        self.golden, self.setup = golden, setup
        self.checkpoint = open_named(golden, checkpoints)
        self.config = self.checkpoint.census.config
        self.mask_BS = golden.tensor("in.attention_mask").to(setup.device)

    def free(self) -> Iterator[Comparison]:
        """Every stored tensor from the hidden states."""
        hidden_BSEL = self._padded(self.golden.tensor("in.valid_hidden_states_bsdl"))
        projection = self._projection(hidden_BSEL.shape[-1])
        features = token_features(hidden_BSEL, self.mask_BS)
        projected = projection(hidden_BSEL, self.mask_BS)
        for stream, width, value in zip(
            STREAMS, (self.config.video_dim, self.config.audio_dim), projected, strict=True
        ):
            scaled = features * math.sqrt(width / self.config.caption_channels)
            yield from self._compare(f"proj_in.{stream}", self._valid(scaled), "free", "features")
            found = self._valid(value)
            yield from self._compare(f"projected.{stream}", found, "free", "projection")
        yield from self._connectors(projected, self.mask_BS, "free")

    def staged(self) -> Iterator[Comparison]:
        """Each projection from its stored input, then the connectors from what is stored of it."""
        projection = self._projection(self.golden.tensor("in.valid_hidden_states_bsdl").shape[-1])
        for stream in STREAMS:
            if f"proj_in.{stream}" in self.golden:
                embed = projection.get_submodule(f"{stream}_aggregate_embed")
                found = embed(self.golden.tensor(f"proj_in.{stream}").to(self.setup.device))
                yield from self._compare(f"projected.{stream}", found, "staged", "projection")
        names = [f"projected.{stream}" for stream in STREAMS]
        if all(name in self.golden for name in names):
            video, audio = (self.golden.tensor(name) for name in names)
            yield from self._connectors((video, audio), torch.ones(video.shape[:2]), "staged")

    def _connectors(
        self, projected: tuple[Tensor, Tensor], mask_BS: Tensor, run: str
    ) -> Iterator[Comparison]:
        rows = int(self.golden.params["S"])
        for form, name in ((MODEL, "out"), (COMFY, "comfy_first64")):
            if f"{name}.video" not in self.golden:
                continue
            found = self._connected(form, projected, mask_BS, rows)
            for stream, value in zip(STREAMS, found, strict=True):
                stored = f"{name}.{stream}"
                kept = self.golden.tensor(stored).shape[1]
                yield from self._compare(stored, value[:, :kept], run, "connectors")

    def _connected(
        self, form: Form, projected: tuple[Tensor, Tensor], mask_BS: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        device, dtype = self.setup.device, torch.float32
        name = self.setup.plan.attention if self.setup.plan else "sdpa"
        attend = load_ltx_attention(name, self.config, device, dtype)
        connectors = load_connectors(self.checkpoint, attend, device=device, dtype=dtype, form=form)
        contexts = connectors(*projected, mask_BS, rows)
        return contexts.video_BLD, contexts.audio_BLD

    def _projection(self, states: int) -> TextProjection:
        projection = TextProjection(self.config, states)
        names = [name for name in self.golden.names if name.startswith(PROJECTION)]
        weights = {n.removeprefix(PROJECTION): self.golden.tensor(n) for n in names}
        projection.load_state_dict(weights)
        return projection.to(self.setup.device)

    def _padded(self, valid_BVEL: Tensor) -> Tensor:
        """Hidden states with zeros where the mask is 0; their values do not matter."""
        batch, length = self.mask_BS.shape
        padded = valid_BVEL.new_zeros(batch, length, *valid_BVEL.shape[2:])
        padded[self.mask_BS.bool().cpu()] = valid_BVEL.flatten(0, 1)
        return padded.to(self.setup.device)

    def _valid(self, x_BSD: Tensor) -> Tensor:
        return x_BSD[self.mask_BS.bool()].unflatten(0, (len(x_BSD), -1))

    def _compare(self, name: str, got: Tensor, run: str, stage: str) -> Iterator[Comparison]:
        if name in self.golden:
            yield compare(name, got, self.golden.tensor(name), run=run, stage=stage)
